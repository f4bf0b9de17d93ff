"""The report, and a comparison of two, as one HTML file."""
