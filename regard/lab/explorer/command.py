"""The command `regard explore`: serve the page to this machine's own browser only, or write it to a file.

The server listens on 127.0.0.1 and answers only requests whose Host is that address and whose Origin, if any, is the
page itself, so neither another machine nor another site in the same browser can reach it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path

from regard.lab.explorer.export import render

PAGE = Path(__file__).with_name("app.py")
LOOPBACK = "127.0.0.1"
PATIENCE = 1  # seconds from Ctrl-C until open connections are closed; uvicorn would wait forever


class LoopbackOnly:
    """ASGI middleware that refuses requests from other hosts or origins."""

    def __init__(self, app, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan" or self.allows(dict(scope["headers"])):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this page is served to its own machine only\n"})

    def allows(self, headers: dict[bytes, bytes]) -> bool:
        """True if Host is this server and Origin, if any, is its own page."""
        origin = headers.get(b"origin")
        known = headers.get(b"host", b"").decode("latin-1") in self.hosts
        return known and (origin is None or origin.decode("latin-1").removeprefix("http://") in self.hosts)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--port", type=int, default=0, help="a free one without")
    parser.add_argument("--no-browser", action="store_true", help="print the address only")
    parser.add_argument(
        "--export", metavar="PATH", type=Path, help="write a page that runs without Python to this .html file, and end"
    )


def main(options: argparse.Namespace) -> None:
    """Write the page to a file if asked to; else serve it until Ctrl-C."""
    if options.export is not None:
        export_page(options)
        return
    import marimo  # noqa: F401  # before anything is printed: what is missing is one line
    import uvicorn

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, options.port))
        except (OSError, OverflowError) as taken:
            options.fail(f"--port {options.port} cannot be used: {taken}; leave it out for a free one")
        listener.listen()  # a browser that connects at once waits instead of being refused
        port, token = listener.getsockname()[1], secrets.token_urlsafe(16)
        address = f"http://{LOOPBACK}:{port}/?access_token={token}"
        print(f"explore at {address}\nCtrl-C ends it", file=sys.stderr, flush=True)
        if not options.no_browser:
            threading.Timer(1.5, webbrowser.open, [address]).start()
        config = uvicorn.Config(page(port, token), log_level="error", timeout_graceful_shutdown=PATIENCE)
        with contextlib.suppress(KeyboardInterrupt):  # with SIGINT ignored, as in background jobs, it returns
            uvicorn.Server(config).run(sockets=[listener])
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # a page's thread may be inside a kernel, where an ordinary exit would abort


def export_page(options: argparse.Namespace) -> None:
    """Write the page that computes in the browser."""
    if options.export.suffix != ".html":
        options.fail(f"--export {options.export} must end in .html")
    try:
        options.export.write_text(render(), encoding="utf-8")
    except OSError as error:
        options.fail(f"--export {options.export} cannot be written: {error.strerror}")
    print(f"the page: {options.export.resolve()}")


def page(port: int, token: str = "") -> LoopbackOnly:
    """Return the explorer as an ASGI application for one port."""
    import marimo

    builder = marimo.create_asgi_app(quiet=True, include_code=False, token=token)
    return LoopbackOnly(builder.with_app(path="", root=str(PAGE)).build(), port)
