"""The page at `/` of the HTTP port: static files, served as they are, without a build step.

    index.html            the frame of all views
    style.css             light and dark, wide and narrow
    figures.js            computes the displayed figures from responses of /api: pure, tested without a browser
    draw.js               elements, charts and dialogs
    overview.js, requests.js, workers.js, playground.js, reference.js    the views
    models.js             the models and their states, a part of the overview
    asking.js, orders.js  calls of the router, and orders of operators
    app.js                polls the router every two seconds and redraws the open view
    uPlot.*               charts, by Leon Sorokin (MIT, uPlot.LICENSE), version 1.6.32 from npm

The files send requests only to the router that serves them, and contain nothing about the cluster. Its data comes from
/api, which requires an operator's key if tenants are configured. The page asks for the key and keeps it until its tab
is closed.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import FastAPI, Request, Response

__all__ = ["FILES", "HEADERS", "add_page"]

_FOLDER = resources.files("router.api.page")
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "LICENSE": "text/plain"}
FILES = {
    "/" if each.name == "index.html" else f"/page/{each.name}": each.read_bytes()
    for each in sorted(_FOLDER.iterdir(), key=lambda each: each.name)
    if each.name.rpartition(".")[2] in _KINDS
}
"""Path -> bytes of the file."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_page(app: FastAPI) -> None:
    """Add the page's files to the application."""
    for path, content in FILES.items():
        app.get(path, include_in_schema=False)(_File(path, content))


class _File:
    """Endpoint that returns one file, or 304 if the browser already has it."""

    def __init__(self, path: str, content: bytes) -> None:
        kind = _KINDS["html" if path == "/" else path.rpartition(".")[2]]
        self._type = f"{kind}; charset=utf-8"
        self._content = content
        self._headers = {**HEADERS, "ETag": f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'}

    async def __call__(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._type, headers=self._headers)
