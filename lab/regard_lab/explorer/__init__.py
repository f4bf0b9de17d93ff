"""The explorer: `regard explore` opens a page with controls for every setting of attention.

The page is one HTML file of `static/` that computes in the browser; tests compare its functions with the library.
"""
