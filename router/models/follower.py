"""Follows the announcements of models, and adds and removes their entries.

    announced ── files from a worker ──> loaded ── pools known ──> served ── leaving ──> last request ends ──> closed

The router refuses new requests of a model if its controller announces that it leaves, or if its announcement, workers
and controller have all been missing for `MODEL_LEASE_S`. Running requests complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.cluster import ModelAnnouncement, WorkerState
from baton.errors import BatonError, StoreUnavailable
from baton.rpc.model_files import FileSource
from baton.tasks import cancel_and_wait
from kvstore.leases import MODEL_LEASE_S, EndpointStore
from router.models.entry import ModelEntry, ModelStores, Shared, load_model
from router.models.files import ModelFileCache
from router.models.table import ModelTable

logger = logging.getLogger(__name__)
POLL_S = 1.0
"""Longest pause between two reads of the announcements, so that a new model is served within seconds."""
RETRY_S = (1.0, 2.0, 5.0, 10.0)
"""Pauses before the next attempts to load a model that could not be loaded."""
LOADS_AT_ONCE = 2
"""Maximum number of models that are loaded at a time: loading keeps a processor busy."""


@dataclass(slots=True, kw_only=True)
class _Serving:
    """An entry, and what keeps it running."""

    entry: ModelEntry
    running: asyncio.Task[None]
    is_own: bool = False
    """True if it is the model of the router's own configuration, which is never closed."""
    missing_since_s: float | None = None
    """Monotonic time since which the model's announcement, workers and controller are missing; None: they are not."""
    is_leaving: bool = False
    """True if the table no longer has its release."""


@dataclass(slots=True, kw_only=True)
class _Loading:
    """A model that is being loaded, or could not be loaded and waits for the next attempt."""

    announced: ModelAnnouncement
    task: asyncio.Task[ModelEntry]
    num_failures: int = 0
    again_s: float = 0.0
    """Monotonic time of the next attempt after a failure."""
    problem: str = ""
    """Reason of the last failure. The same reason is logged once."""


class ModelFollower:
    """Keeps the table equal to the announced models while `run` runs.

    Args:
        own: entry of the model of the router's own configuration, which is served from the start; None: there is none.
    """

    def __init__(
        self,
        table: ModelTable,
        shared: Shared,
        store: EndpointStore,
        files: ModelFileCache,
        own: ModelEntry | None,
    ) -> None:
        self._table = table
        self._shared = shared
        self._store = store
        self._files = files
        self._own = own
        self._serving: dict[str, _Serving] = {}
        self._loading: dict[str, _Loading] = {}
        self._retired: list[_Serving] = []
        """Replaced entries whose last requests still run."""
        self._turns = asyncio.Semaphore(LOADS_AT_ONCE)
        self._is_full = False
        """True if the log already reports that further models are ignored."""
        self.has_read = False
        """True once the announcements have been read."""
        if own is not None:
            table.put(own.release)

    @property
    def entries(self) -> Sequence[ModelEntry]:
        """Entries of all models that are served, or whose last requests still run, ordered by content id."""
        if not self._serving and self._own is not None:
            return (self._own,)  # before `run`
        return [self._serving[content].entry for content in sorted(self._serving)]

    async def start(self) -> None:
        """Start the processes of the own model's encoder, so that its first requests need not wait for them.

        Raises:
            ModelLoadError: the own model's chat template is not valid.
        """
        if self._own is not None:
            await self._own.start()

    async def run(self) -> None:
        """Follow until cancelled. While Redis is away, the known models are served."""
        async with asyncio.TaskGroup() as tasks:
            if self._own is not None:
                running = tasks.create_task(self._own.run(), name="own model")
                self._serving[self._own.model.content_id] = _Serving(entry=self._own, running=running, is_own=True)
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await self._poll(tasks)
                await asyncio.sleep(min(self._shared.config.index.poll_s, POLL_S))

    async def close(self) -> None:
        """Close all entries. Call this when `run` has ended."""
        await cancel_and_wait([each.task for each in self._loading.values()])
        entries = [each.entry for each in (*self._serving.values(), *self._retired)]
        if not entries and self._own is not None:
            entries = [self._own]
        for each in entries:
            await each.close()
        self._files.close()

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        announced = {each.content_id: each for each in await self._store.list_models()}
        self.has_read = True
        for each in announced.values():
            self._see(each)
        now_s = time.monotonic()
        for content, serving in self._serving.items():
            self._note_missing(serving, content in announced, now_s)
        for content in [content for content in self._loading if content not in announced]:
            await cancel_and_wait([self._loading.pop(content).task])
        for content in list(self._loading):
            self._finish_loading(self._loading[content], tasks, now_s)
        await self._close_left()

    # -- seeing --------------------------------------------------------------------------------------------------------

    def _see(self, announced: ModelAnnouncement) -> None:
        """Follow one announcement."""
        content = announced.content_id
        serving = self._serving.get(content)
        if announced.is_leaving:
            if serving is not None:
                self._leave(serving)
            return
        if serving is not None:
            known = serving.entry.announcement
            now = _adopted(known, announced) if serving.is_own else announced
            if serving.is_own or not _is_loaded_anew(known, announced):
                serving.entry.watch.announcement = now
                serving.is_leaving = False
                self._table.put(serving.entry.release)
                return
        if content not in self._loading and self._has_room(serving is not None):
            self._begin_loading(announced)

    def _has_room(self, is_replaced: bool) -> bool:
        """Return whether one more model may be served. If not, log once that further models are ignored."""
        most = self._shared.config.router.max_models
        is_full = not is_replaced and len(self._serving.keys() | self._loading.keys()) >= most
        if is_full and not self._is_full:
            logger.warning("more than %d models are announced; the others are not served (router.max_models)", most)
        self._is_full = is_full
        return not is_full

    def _note_missing(self, serving: _Serving, is_announced: bool, now_s: float) -> None:
        if is_announced or serving.is_own or serving.entry.watch.is_known:
            serving.missing_since_s = None
        elif serving.missing_since_s is None:
            serving.missing_since_s = now_s
        elif now_s - serving.missing_since_s > MODEL_LEASE_S and not serving.is_leaving:
            logger.warning("%s is not announced any more", serving.entry.announcement.name)
            self._leave(serving)

    def _leave(self, serving: _Serving) -> None:
        """Refuse new requests of a model."""
        if not serving.is_leaving:
            serving.is_leaving = True
            entry = serving.entry
            entry.watch.announcement = replace(entry.announcement, is_leaving=True)
            self._table.drop(entry.model.content_id)
            logger.info("%s is no longer served; its running requests complete", entry.announcement.name)

    async def _close_left(self) -> None:
        """Close the entries of models that have left and whose last requests have ended."""
        left = {
            content: serving
            for content, serving in self._serving.items()
            if serving.is_leaving and not serving.is_own and not serving.entry.counts.in_flight
        }
        for content in left:
            del self._serving[content]
        replaced = [each for each in self._retired if not each.entry.counts.in_flight]
        self._retired = [each for each in self._retired if each.entry.counts.in_flight]
        for each in (*left.values(), *replaced):
            await cancel_and_wait([each.running])
            await each.entry.close()
        if left or replaced:
            used = {each.entry.announcement.files for each in (*self._serving.values(), *self._retired)}
            for each in (*left.values(), *replaced):
                if each.entry.announcement.files not in used:
                    self._files.release(each.entry.announcement.files)

    # -- loading -------------------------------------------------------------------------------------------------------

    def _begin_loading(self, announced: ModelAnnouncement, num_failures: int = 0, problem: str = "") -> None:
        task = asyncio.create_task(self._load(announced), name=f"load {announced.name}")
        loading = _Loading(announced=announced, task=task, num_failures=num_failures, problem=problem)
        self._loading[announced.content_id] = loading

    def _finish_loading(self, loading: _Loading, tasks: asyncio.TaskGroup, now_s: float) -> None:
        """Serve a model that is loaded, or try again later."""
        if not loading.task.done():
            return
        announced, error = loading.announced, loading.task.exception()
        if error is None:
            del self._loading[announced.content_id]
            self._serve(loading.task.result(), tasks)
            return
        if not isinstance(error, BatonError):
            raise error
        if not loading.again_s:
            loading.again_s = now_s + RETRY_S[min(loading.num_failures, len(RETRY_S) - 1)]
            if str(error) != loading.problem:
                logger.warning("%s cannot be served yet: %s", announced.name, error)
                loading.problem = str(error)
        elif now_s >= loading.again_s:
            self._begin_loading(announced, loading.num_failures + 1, loading.problem)

    def _serve(self, entry: ModelEntry, tasks: asyncio.TaskGroup) -> None:
        content = entry.model.content_id
        if (replaced := self._serving.get(content)) is not None:
            self._retired.append(replaced)
        running = tasks.create_task(entry.run(), name=f"model {entry.announcement.name}")
        self._serving[content] = _Serving(entry=entry, running=running)
        self._table.put(entry.release)
        logger.info("%s is served, from release %s", entry.announcement.name, entry.announcement.release)

    async def _load(self, announced: ModelAnnouncement) -> ModelEntry:
        """Load a model and return its entry, whose pools are known.

        Raises:
            BatonError: no worker or controller provides its files, or they are not valid.
        """
        stores = ModelStores.connect(self._shared, announced.content_id)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(stores.close)
            async with self._turns:
                folder = await self._files.folder(announced.files, await _sources(stores, announced.files))
                default = self._shared.config.router.default_max_tokens
                model = await asyncio.to_thread(load_model, folder, "", announced, default)
                entry = ModelEntry.build(self._shared, model, stores, announced)
                undo.pop_all()
                undo.push_async_callback(entry.close)
                await entry.start()
                await entry.watch.poll()
                undo.pop_all()
                return entry


async def _sources(stores: ModelStores, digest: str) -> list[FileSource]:
    """Return the processes that provide a model's files: its workers, and last its controller."""
    workers = [each.info for each in await stores.leases.list_workers() if each.load.state is not WorkerState.DEAD]
    sources = [FileSource(info.id, info.address, info.incarnation) for info in workers if info.files == digest]
    if (controller := await stores.leases.get_controller()) is not None:
        sources.append(FileSource("the controller", controller.address, controller.incarnation))
    return sources


def _adopted(own: ModelAnnouncement, announced: ModelAnnouncement) -> ModelAnnouncement:
    """Return the announcement of a router's own model, with the values that only its controller knows."""
    return replace(
        own,
        share=announced.share,
        release=announced.release,
        is_asleep=announced.is_asleep,
        wake_s=announced.wake_s,
        problem=announced.problem,
        is_leaving=False,
    )


def _is_loaded_anew(known: ModelAnnouncement, announced: ModelAnnouncement) -> bool:
    """Return whether the entry must be built again, because a value that it was built from has changed."""
    names = ("name", "release", "files", "max_model_len", "mode", "path", "weights", "kv_dtype")
    return any(getattr(known, name) != getattr(announced, name) for name in names)
