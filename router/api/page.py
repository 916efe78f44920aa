"""The page at `/` of the HTTP port: one file that reads /api/metrics every two seconds, and draws goodput and pools.

Where that needs an operator's key, the page asks for it, and keeps it as long as its tab is open.
"""

from __future__ import annotations

from importlib import resources

PAGE = resources.files("router.api").joinpath("page.html").read_bytes()
HEADERS = {
    # Everything is in the file, and it asks nobody but the router that it came from.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
