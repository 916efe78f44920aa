"""Headless Chromium for tests of the page: one browser, and what every page of it must not do."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package), which shows the page")
WAIT_MS = 60_000
"""The longest wait for something to be shown: the machine may be busy."""


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Chromium, for the tests of one file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def opened_page(
    started: Any, url: str, *, width: int = 1280, scheme: str = "light", key: str = "", may_fail: tuple[int, ...] = ()
) -> Iterator[Any]:
    """A page of its own context. At the end of the block, nothing has gone wrong in it, and nobody but the page's own
    host was asked.

    Args:
        key: the API key that the page has already.
        may_fail: the statuses of answers that the test provokes, which the browser's console shows as errors.
    """
    context = started.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    problems: list[str] = []
    host = urlsplit(url).netloc
    expected = tuple(f"the server responded with a status of {status}" for status in may_fail)

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and not any(each in message.text for each in expected):
            problems.append(f"{message.type}: {message.text}")

    def check(request: Any) -> None:
        if not request.url.startswith("data:") and urlsplit(request.url).netloc != host:
            problems.append(f"asked {request.url}")

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(f"thrown: {error}"))
    page.on("request", check)
    if key:
        page.add_init_script(f"sessionStorage.setItem('baton-api-key', {key!r})")
    try:
        page.goto(url)
        yield page
        assert not problems
    finally:
        context.close()


def serious(page: Any) -> list[str]:
    """What axe-core finds of serious or critical violations of WCAG, and where."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{found['id']}: {[node['html'][:120] for node in found['nodes']]}"
        for found in violations
        if found["impact"] in ("serious", "critical")
    ]


def is_too_wide(page: Any) -> bool:
    """Whether the page has to be scrolled sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))
