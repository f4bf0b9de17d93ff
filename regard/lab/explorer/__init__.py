"""The explorer: `regard explore` opens a page on which every knob of attention can be turned.

`views` computes its numbers and figures with the library's public functions, `app` is the marimo page that shows
them, `command` serves it to this machine only.
"""
