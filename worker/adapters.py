"""Checks of adapters' folders for routers, one at a time: a check reads a whole folder, perhaps over a network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.adapters import AdapterFacts
from baton.errors import InvalidRequest, Overloaded, Unsupported
from baton.registered_adapters import CHECK_S, check_path


class AdapterChecks:
    """Checker of adapters' folders.

    Args:
        check: reads a folder; see `ServingEngine.check_adapter`. None: this worker serves no adapters.
        timeout_s: deadline of a check, in seconds.
    """

    def __init__(
        self, check: Callable[[str], Awaitable[AdapterFacts]] | None = None, timeout_s: float = CHECK_S
    ) -> None:
        self._check = check
        self._timeout_s = timeout_s
        self._running: asyncio.Future[AdapterFacts] | None = None

    async def check(self, path: str) -> AdapterFacts:
        """Return what a worker finds in a folder.

        A check that is past its deadline, or whose caller has left, runs on: its thread may wait for a file system. The
        worker refuses further checks until it ends.

        Raises:
            InvalidRequest: the folder holds no adapter that this worker can apply, or cannot be read in time.
            Overloaded: another check is running.
            Unsupported: this worker serves no adapters.
        """
        if self._check is None:
            raise Unsupported(
                "this worker serves no adapters; set engine.max_adapters, and engine.runner to auto or transformers"
            )
        check_path(path)
        if self._running is not None and not self._running.done():
            raise Overloaded("the worker is checking another adapter; try again later")
        running = self._running = asyncio.ensure_future(self._check(path))
        running.add_done_callback(_forget_error)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(running)
        except TimeoutError:
            raise InvalidRequest(
                f"the worker could not read {path} within {self._timeout_s:g} s; check the file system that holds it",
                "path",
            ) from None


def _forget_error(running: asyncio.Future[AdapterFacts]) -> None:
    """Take the error of a check whose caller has left."""
    if not running.cancelled():
        running.exception()
