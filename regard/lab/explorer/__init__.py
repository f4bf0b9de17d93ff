"""The explorer: `regard explore` opens a page with controls for every setting of attention.

`views` computes its numbers and figures with the library's public functions, `app` is the marimo page that shows
them, and `command` serves it to this machine only.
"""
