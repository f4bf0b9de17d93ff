"""The command `regard explore`: serve the page to this machine's own browser only, or write it to a file."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

SCRIPTS = ("normalizers.js", "page.js")
LOOPBACK = "127.0.0.1"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--port", type=int, default=0, help="a free one without")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    parser.add_argument("--export", metavar="PATH", type=Path, help="write the page to this .html file, and end")


def main(options: argparse.Namespace) -> None:
    """Write the page to a file if asked to; else serve it until Ctrl-C."""
    if options.export is not None:
        export_page(options)
        return
    try:
        server = ThreadingHTTPServer((LOOPBACK, options.port), PageHandler)
    except (OSError, OverflowError) as taken:
        options.fail(f"--port {options.port} cannot be used: {taken}; leave it out for a free one")
    with server:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        print(f"explore at {address}\nCtrl-C ends it", file=sys.stderr, flush=True)
        if not options.no_browser:
            webbrowser.open(address)
        server.serve_forever()


class PageHandler(BaseHTTPRequestHandler):
    """Answers every request with the page."""

    def do_GET(self) -> None:
        body = render().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing about a request."""


def export_page(options: argparse.Namespace) -> None:
    """Write the page to the file of --export."""
    if options.export.suffix != ".html":
        options.fail(f"--export {options.export} must end in .html")
    try:
        options.export.write_text(render(), encoding="utf-8")
    except OSError as error:
        options.fail(f"--export {options.export} cannot be written: {error.strerror}")
    print(f"the page: {options.export.resolve()}")


def render() -> str:
    """Return the page with its scripts inside: one HTML file that needs neither Python nor a network."""
    page = read_part("page.html")
    for name in SCRIPTS:
        page = page.replace(f"/* {name} */", f"\n{read_part(name)}")
    return page


def read_part(name: str) -> str:
    """Return a file of the folder `static`."""
    return resources.files("regard_lab.explorer").joinpath("static", name).read_text(encoding="utf-8")
