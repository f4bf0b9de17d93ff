"""The report of an examination as text, HTML, JSON or PNG."""
