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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.cluster import ModelAnnouncement, WorkerState
from baton.errors import BatonError, ModelLoadError, StoreUnavailable
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
FIRST_LOADS_S = 60.0
"""Longest time for which a router that starts counts as not ready while it loads the announced models."""
RERUN_S = 1.0
"""Pause before an entry that has failed runs again."""
LINGER_S = 2.0
"""Time for which an entry stays after its last request: another may have found its service, and not begun yet."""
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
    unused_since_s: float | None = None
    """Monotonic time since which it has no request; None: it has some, or serves new ones."""

    def is_unused(self, now_s: float) -> bool:
        """Return whether an entry that gets no new requests has had none for `LINGER_S`. Call this at each poll."""
        if self.entry.counts.in_flight:
            self.unused_since_s = None
        elif self.unused_since_s is None:
            self.unused_since_s = now_s
        return self.unused_since_s is not None and now_s - self.unused_since_s >= LINGER_S


@dataclass(slots=True, kw_only=True)
class _Loading:
    """A model that is being loaded, or could not be loaded and waits for the next attempt."""

    announced: ModelAnnouncement
    """The newest announcement, which the next attempt loads."""
    task: asyncio.Task[ModelEntry]
    num_failures: int = 0
    again_s: float = 0.0
    """Monotonic time of the next attempt after a failure."""
    problem: str = ""
    """Reason of the last failure. The same reason is logged once."""

    @property
    def is_tried(self) -> bool:
        """True if an attempt to load it has failed."""
        return bool(self.num_failures or self.again_s)


class ModelFollower:
    """Keeps the table equal to the announced models while `run` runs.

    Args:
        own: entry of the model of the router's own configuration, which is served from the start; None: there is none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        table: ModelTable,
        shared: Shared,
        store: EndpointStore,
        files: ModelFileCache,
        own: ModelEntry | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._shared = shared
        self._store = store
        self._files = files
        self._own = own
        self._clock = clock
        self._serving: dict[str, _Serving] = {}
        self._loading: dict[str, _Loading] = {}
        self._retired: list[_Serving] = []
        """Replaced entries whose last requests still run."""
        self._digests: set[str] = set()
        """Digests of the files that may not be removed."""
        self._turns = asyncio.Semaphore(LOADS_AT_ONCE)
        self._is_full = False
        """True if the log already reports that further models are ignored."""
        self.has_read = False
        """True once the announcements have been read."""
        self._first: set[str] = set()
        """Models that were announced at the first read and that no attempt to load has ended for yet."""
        self._first_until_s = 0.0
        """Monotonic time until which they are waited for."""
        if own is not None:
            table.put(own.release)

    @property
    def entries(self) -> Sequence[ModelEntry]:
        """Entries of all models that are served, or whose last requests still run, ordered by content id."""
        if not self._serving and self._own is not None:
            return (self._own,)  # before `run`
        return [self._serving[content].entry for content in sorted(self._serving)]

    @property
    def is_starting(self) -> bool:
        """True while it loads the models that were announced when it started, which it must not call unknown."""
        return bool(self._first) and self._clock() < self._first_until_s

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
                running = tasks.create_task(_kept_running(self._own), name="own model")
                self._serving[self._own.model.content_id] = _Serving(entry=self._own, running=running, is_own=True)
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await self._poll(tasks)
                await asyncio.sleep(min(self._shared.config.index.poll_s, POLL_S))

    async def close(self) -> None:
        """Close all entries. Call this when `run` has ended."""
        for loading in self._loading.values():
            await _give_up(loading)
        entries = [each.entry for each in (*self._serving.values(), *self._retired)]
        if not entries and self._own is not None:
            entries = [self._own]
        for each in entries:
            await each.close()
        self._files.close()

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        announced = {each.content_id: each for each in await self._store.list_models()}
        for each in announced.values():
            self._see(each)
        for replaced in (each.entry for each in self._retired):
            if (latest := announced.get(replaced.model.content_id)) is not None:
                replaced.watch.announcement = _with_state(replaced.announcement, latest)
        now_s = self._clock()
        for content, serving in self._serving.items():
            self._note_missing(serving, content in announced, now_s)
        wanted = {content for content, each in announced.items() if not each.is_leaving}
        for content in self._loading.keys() - wanted:
            await _give_up(self._loading.pop(content))
        for content in list(self._loading):
            self._finish_loading(self._loading[content], tasks, now_s)
        self._note_first(now_s)
        await self._close_left(now_s)
        self._release_files()

    def _note_first(self, now_s: float) -> None:
        untried = {content for content, loading in self._loading.items() if not loading.is_tried}
        if self.has_read:
            self._first &= untried
        else:
            self._first, self._first_until_s, self.has_read = untried, now_s + FIRST_LOADS_S, True

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
                serving.is_leaving, serving.unused_since_s = False, None
                self._table.put(serving.entry.release)
                return
        if (loading := self._loading.get(content)) is not None:
            loading.announced = announced
        elif self._has_room(serving is not None):
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
        if serving.is_own and serving.is_leaving and not is_announced and serving.entry.watch.is_known:
            # A controller of an older release, which announces no model, has replaced the one that left.
            serving.entry.watch.announcement = replace(serving.entry.announcement, is_leaving=False)
            serving.is_leaving = False
            self._table.put(serving.entry.release)
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

    async def _close_left(self, now_s: float) -> None:
        """Close the entries of models that have left and whose last requests have ended."""
        for content, serving in [*self._serving.items()]:
            if serving.is_leaving and not serving.is_own and serving.is_unused(now_s):
                self._retired.append(self._serving.pop(content))
        for each in [each for each in self._retired if each.is_unused(now_s)]:
            await cancel_and_wait([each.running])
            await each.entry.close()
            self._retired.remove(each)

    def _release_files(self) -> None:
        """Allow the removal of files that no entry has any more and none is loaded with."""
        used = {each.entry.announcement.files for each in (*self._serving.values(), *self._retired)}
        used |= {each.announced.files for each in self._loading.values()}
        for digest in self._digests - used:
            self._files.release(digest)
        self._digests &= used

    # -- loading -------------------------------------------------------------------------------------------------------

    def _begin_loading(self, announced: ModelAnnouncement, num_failures: int = 0, problem: str = "") -> None:
        task = asyncio.create_task(self._load(announced), name=f"load {announced.name}")
        self._loading[announced.content_id] = _Loading(
            announced=announced, task=task, num_failures=num_failures, problem=problem
        )

    def _finish_loading(self, loading: _Loading, tasks: asyncio.TaskGroup, now_s: float) -> None:
        """Serve a model that is loaded, or try again later."""
        if not loading.task.done():
            return
        announced, is_cancelled = loading.announced, loading.task.cancelled()
        error = ModelLoadError("its load was cancelled") if is_cancelled else loading.task.exception()
        if error is None:
            del self._loading[announced.content_id]
            self._serve(loading.task.result(), tasks)
            return
        if not loading.again_s:
            loading.again_s = now_s + RETRY_S[min(loading.num_failures, len(RETRY_S) - 1)]
            if str(error) != loading.problem:
                # Code that reads the files may raise any error: it must not end what serves the other models.
                trace = None if isinstance(error, BatonError) else error
                logger.warning("%s cannot be served yet: %s", announced.name, error, exc_info=trace)
                loading.problem = str(error)
        elif _is_loaded_anew(announced, loading.announced):
            self._begin_loading(loading.announced)
        elif now_s >= loading.again_s:
            self._begin_loading(loading.announced, loading.num_failures + 1, loading.problem)

    def _serve(self, entry: ModelEntry, tasks: asyncio.TaskGroup) -> None:
        content = entry.model.content_id
        if (replaced := self._serving.get(content)) is not None:
            self._retired.append(replaced)
        running = tasks.create_task(_kept_running(entry), name=f"model {entry.announcement.name}")
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
                self._digests.add(announced.files)
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


async def _kept_running(entry: ModelEntry) -> None:
    """Run an entry until cancelled. An error of one model must not end what serves the others."""
    while True:
        try:
            await entry.run()
        except Exception:
            name = entry.announcement.name
            logger.exception("%s is served from its last known state for %g s: its entry failed", name, RERUN_S)
        await asyncio.sleep(RERUN_S)


async def _give_up(loading: _Loading) -> None:
    """Cancel an attempt to load a model, or close the entry that it has built already."""
    await cancel_and_wait([loading.task])
    if not loading.task.cancelled() and loading.task.exception() is None:
        await loading.task.result().close()


async def _sources(stores: ModelStores, digest: str) -> list[FileSource]:
    """Return the processes that provide a model's files: its workers, and last its controller."""
    workers = [each.info for each in await stores.leases.list_workers() if each.load.state is not WorkerState.DEAD]
    sources = [FileSource(info.id, info.address, info.incarnation) for info in workers if info.files == digest]
    if (controller := await stores.leases.get_controller()) is not None:
        sources.append(FileSource("the controller", controller.address, controller.incarnation))
    return sources


def _adopted(own: ModelAnnouncement, announced: ModelAnnouncement) -> ModelAnnouncement:
    """Return the announcement of a router's own model, with the values that only its controller knows."""
    return replace(_with_state(own, announced), share=announced.share, release=announced.release)


def _with_state(known: ModelAnnouncement, latest: ModelAnnouncement) -> ModelAnnouncement:
    """Return an announcement with the state of a later one of the same model."""
    return replace(
        known,
        is_asleep=latest.is_asleep,
        wake_s=latest.wake_s,
        problem=latest.problem,
        is_leaving=latest.is_leaving,
    )


def _is_loaded_anew(known: ModelAnnouncement, announced: ModelAnnouncement) -> bool:
    """Return whether the entry must be built again, because a value that it was built from has changed."""
    names = ("name", "release", "files", "max_model_len", "mode", "path", "weights", "kv_dtype")
    return any(getattr(known, name) != getattr(announced, name) for name in names)
