"""The report of an examination: text, HTML, JSON, PNG, a data frame; and the comparison of two."""
