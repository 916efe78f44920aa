"""The router's view of the workers: their leases, the jobs that it sent them, and the workers that it suspects."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import itemgetter
from statistics import mode

import xxhash

from baton import wire
from baton.blocks import HASH_BLOCK
from baton.cluster import ModelState, Role, Worker, WorkerInfo, WorkerState
from baton.costs import PRIOR, StepCosts, least_of, lifted, typical
from baton.messages import Adapter, SequenceSpec
from baton.tasks import Flag, paced
from baton.telemetry.instruments import Instruments
from kvstore.index import Mirror, Owners, Position
from router.placement import Candidate, Job, LoadTracker, Prompt, Residence, Turn
from router.placement.load import LEAST_LOADED, LoadOrders
from router.placement.policy import session_of

SLICE_S = 0.002
"""Time for which leases are adopted before other tasks run."""
UNKNOWN_LENGTH = 2**31 - 1
"""Context window of a model that does not declare one: only the workers' limit applies."""
SUSPICION_S = 10.0
"""Minimum time for which a worker whose stream broke gets no work, unless it returns as a new incarnation."""
SHORT = 8
"""A worker whose longest sequence is less than 1/SHORT of what is usual in its role is misconfigured, or its lease is
wrong. It gets only requests that fit, and does not lower the limit for all requests. Prefill workers are also compared
with the decode workers, which can work without them."""
ADAPTER_LOAD_S = 0.5
"""Assumed time to load an adapter on a worker that has not loaded any."""
LOADING_S = 5.0
"""Time after which an adapter that a request made a worker load must be in the worker's lease."""
MAX_LOADING = 10_000
"""Maximum number of such loads that are known at a time."""
FEW_WORKERS = 128
"""Number of workers up to which every request considers all of them."""
MAX_HOLDERS = 32
"""Number of workers that are considered in larger pools because they hold most of the prompt, and because they hold the
adapter."""
MAX_WITH_ROOM = 32
"""Number of workers with room that are considered in larger pools when an answer migrates."""
LEAVING_S = 3.0
"""Time for which a worker that asked on a stream to migrate its choices gets no work. After that its lease says that it
leaves its role."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep of a model, as its controller announces it."""

    is_asleep: bool = False
    """True if the model is asleep or wakes."""
    is_waking: bool = False
    """True if it should have workers."""
    problem: str = ""
    """Reason why it does not wake; empty: none is known."""
    wake_s: float = 0.0
    """Seconds that its latest wake-up took; 0: unknown."""


class PoolView:
    """Snapshot of the pools, fed by `update` (leases) and by the router's own placements.

    Args:
        lookup: prompt keys -> number of leading blocks that each worker is believed to hold; see `Mirror.lookup`.
        clock: monotonic seconds.
        longest: longest sequence that the model supports; caps the limits that workers report.
        lease_s: time for which a dead worker may still be listed; a suspected worker gets no work for as long.
        few_workers: number of workers up to which `candidates` returns all of them.
    """

    def __init__(
        self,
        lookup: Callable[..., Mapping[str, int]],
        clock: Callable[[], float],
        longest: int = UNKNOWN_LENGTH,
        lease_s: float = 0.0,
        few_workers: int = FEW_WORKERS,
    ) -> None:
        self._few_workers = few_workers
        self._suspicion_s = max(SUSPICION_S, lease_s)
        self._lookup = lookup
        self._clock = clock
        self._longest = longest
        self._leased: Mapping[str, Worker] = {}
        """The latest leases, as they were read."""
        self._workers: dict[str, Worker] = {}
        """The latest leases, with plausible costs."""
        self._bounds = _Bounds()
        self._updating = asyncio.Lock()
        self._max_model_len: int | None = None
        self._short: dict[str, int] = {}
        """Worker with a much lower limit than the others -> the longest sequence that it holds."""
        self._block_size = HASH_BLOCK
        self._resumes_anywhere = True
        """False if any worker reports False: all workers serve the same model."""
        self._loads: dict[tuple[str, int], LoadTracker] = {}
        """Load by worker and epoch: a new incarnation does not inherit jobs."""
        self._ready: list[LoadTracker] = []
        """Loads of the workers that take work."""
        self._draining: list[LoadTracker] = []
        """Loads of the draining workers, which are only sources of prefixes."""
        self._orders: LoadOrders | None = None
        """Orders of `_ready`; None if there are few workers."""
        self._by_id: dict[str, LoadTracker] = {}
        """Loads of the workers above by id; empty if there are few."""
        self._holders: dict[str, dict[str, None]] = {}
        """Digest of an adapter -> workers that hold or load it; empty if there are few."""
        self._rings: dict[Role, list[tuple[int, Worker]]] = {}
        """Role -> workers that take images, by their places; empty until they are needed, and if there are few."""
        self._lacking: dict[str, frozenset[str]] = {}
        """Worker of an older release -> fields that it does not know."""
        self._without_adapters: frozenset[str] = frozenset()
        """Workers that serve no adapters."""
        self._loading: dict[tuple[str, int, str], float] = {}
        """Worker, epoch and digest of an adapter that a request of this router makes it load -> time until which it is
        believed to hold it although its lease does not list it."""
        self._samplers: tuple[str, ...] = ()
        self._blind: frozenset[str] = frozenset()
        """Workers that take no images."""
        self._image_placeholder: int | None = None
        self._residence = Residence()
        self._suspects: dict[tuple[str, int], float] = {}
        self._leaving: dict[tuple[str, int, Role], float] = {}
        self._waiting: set[Callable[[], object]] = set()
        """Callbacks of the next change."""
        self._sleep = Sleep()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers that have a lease, ordered by id."""
        return tuple(self._workers.values())

    def max_model_len(self) -> int | None:
        """Return the longest sequence that every worker can hold, except workers far below the others.

        Returns:
            None if no worker is known.
        """
        return self._max_model_len

    @property
    def block_size(self) -> int:
        """Block size of most workers, in tokens; the size of a hash block if no worker is known."""
        return self._block_size

    async def update(self, workers: Collection[Worker]) -> None:
        """Adopt the current leases; a worker without a lease is gone.

        A lease that is the same object as at the last call, of an idle worker, costs next to nothing. Other tasks run
        meanwhile; until the end, requests are placed by the former leases.
        """
        async with self._updating:
            await self._adopt({worker.info.id: worker for worker in workers})
        now = self._clock()
        self._suspects = {who: until for who, until in self._suspects.items() if until > now}
        self._leaving = {who: until for who, until in self._leaving.items() if until > now}
        self._loading = {what: until for what, until in self._loading.items() if until > now}
        self._order_loads(now)
        self._changed()

    def note_sleep(self, *, is_asleep: bool, num_desired: int, problem: str, wake_s: float = 0.0) -> None:
        """Update the sleep that the model's controller announces.

        Args:
            is_asleep: True if the model is asleep or wakes.
            num_desired: number of workers that both pools should have.
            problem: see `ModelAnnouncement.problem`.
            wake_s: see `ModelAnnouncement.wake_s`.
        """
        sleep = Sleep(is_asleep, num_desired > 0, problem, wake_s)
        if sleep != self._sleep:
            self._sleep = sleep
            self._changed()

    @property
    def sleep(self) -> Sleep:
        """Sleep of the model, as its controller last announced it."""
        return self._sleep

    @property
    def sleeps(self) -> bool:
        """True if the model is asleep or wakes. Each request reads this, so it costs nothing for other models."""
        return self._sleep.is_asleep and not self.is_ready(Role.DECODE)

    @property
    def state(self) -> ModelState:
        """State of the model. It is not asleep if any decode worker is ready, whatever its controller announces."""
        if self.is_ready(Role.DECODE):
            return ModelState.READY
        if not self._sleep.is_asleep:
            return ModelState.DOWN
        return ModelState.WAKING if self._sleep.is_waking else ModelState.ASLEEP

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for wake in waiting:
            wake()

    async def _adopt(self, leased: Mapping[str, Worker]) -> None:
        last, bounds = self._leased, self._bounds
        changed = [worker for worker_id, worker in leased.items() if last.get(worker_id) is not worker]
        is_described_alike = len(leased) == len(last) and all(
            (former := last.get(worker.info.id)) is not None and former.info is worker.info for worker in changed
        )
        if not is_described_alike or any(last[w.info.id].load.costs != w.load.costs for w in changed):
            bounds = await _Bounds.of(leased.values())
        adopted: dict[str, Worker] = {}
        loads: dict[tuple[str, int], LoadTracker] = {}
        async for worker_id, worker in paced(sorted(leased.items()), SLICE_S):
            is_same = last.get(worker_id) is worker and bounds == self._bounds
            adopted[worker_id] = now = self._workers[worker_id] if is_same else _bounded(worker, bounds.least)
            incarnation = worker_id, worker.info.epoch
            book = self._loads.get(incarnation)
            if book is None or not is_same or worker.load.queued_tokens or book.is_busy:
                book = book or LoadTracker.of(now, self._residence)
                book.report(now, bounds.usual[worker.info.role])
            loads[incarnation] = book
        # No task runs from here on: the view changes at once.
        self._leased, self._workers, self._bounds = leased, adopted, bounds
        # Keep the jobs of a worker whose lease is missing once: it must not look idle when the lease is back.
        self._loads = {incarnation: book for incarnation, book in self._loads.items() if book.is_busy} | loads
        if not is_described_alike:
            self._describe([worker.info for worker in adopted.values()])
        self._ready, self._draining = (
            [loads[w.info.id, w.info.epoch] for w in adopted.values() if w.load.state is state]
            for state in (WorkerState.READY, WorkerState.DRAINING)
        )

    def _describe(self, infos: Sequence[WorkerInfo]) -> None:
        """Adopt what the workers' descriptions say."""
        lengths = {info.id: min(info.max_model_len, self._longest) for info in infos}
        self._short = self._much_shorter(infos, lengths)
        self._max_model_len = min((lengths[worker_id] for worker_id in lengths.keys() - self._short), default=None)
        self._block_size = mode(info.block_size for info in infos) if infos else HASH_BLOCK
        self._resumes_anywhere = all(info.resumes_anywhere for info in infos)
        lacking = {info.id: wire.fields_unknown_to(info.known_fields) for info in infos}
        self._lacking = {worker_id: fields for worker_id, fields in lacking.items() if fields}
        self._without_adapters = frozenset(info.id for info in infos if not info.max_adapters)
        self._samplers = tuple(sorted({info.sampler for info in infos}))
        self._blind = frozenset(info.id for info in infos if not info.takes_images)
        self._image_placeholder = next((info.image_placeholder for info in infos if info.takes_images), None)

    def _order_loads(self, now: float) -> None:
        """Keep the loads of many workers in order."""
        books = self._ready + self._draining
        is_large = len(books) > self._few_workers
        if self._orders is not None and not is_large:
            self._orders.close()
            self._orders = None
        self._by_id = {book.worker_id: book for book in books} if is_large else {}
        self._holders, self._rings = {}, {}
        if is_large:
            self._orders = self._orders or LoadOrders()
            self._orders.adopt(self._ready, now)
            for worker_id, worker in self._workers.items():
                for digest in worker.load.adapters:
                    self._holders.setdefault(digest, {})[worker_id] = None
            for worker_id, _, digest in self._loading:
                self._holders.setdefault(digest, {})[worker_id] = None

    def _much_shorter(self, infos: Sequence[WorkerInfo], lengths: Mapping[str, int]) -> dict[str, int]:
        usual = {role: _upper_median([lengths[info.id] for info in infos if info.role is role]) for role in Role}
        usual[Role.PREFILL] = max(usual.values())
        return {info.id: lengths[info.id] for info in infos if lengths[info.id] * SHORT < usual[info.role]}

    def on_change(self, wake: Callable[[], object]) -> None:
        """Call back once, at the next `update`, or earlier if an announcement changes the state."""
        self._waiting.add(wake)

    def forget(self, wake: Callable[[], object]) -> None:
        """Do not call back; idempotent."""
        self._waiting.discard(wake)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return after the next change (see `on_change`), or after the timeout."""
        flag = Flag()
        self.on_change(flag.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await flag.wait()
        finally:
            self.forget(flag.set)

    def get(self, worker_id: str) -> Worker:
        """Return the worker with this id.

        Raises:
            KeyError: the worker has no lease.
        """
        return self._workers[worker_id]

    def suspect(self, worker: Worker) -> None:
        """Give this incarnation no work for a while: its stream broke, although its lease may still be valid."""
        self._suspects[worker.info.id, worker.info.epoch] = self._clock() + self._suspicion_s

    def leaves(self, worker: Worker) -> None:
        """Record that a worker takes no new work in its role, even if its lease does not say so yet."""
        info = worker.info
        self._leaving[info.id, info.epoch, info.role] = self._clock() + LEAVING_S

    def stays(self, worker: Worker) -> bool:
        """Return whether a worker that announced to leave its role stays, according to its lease."""
        now = self._workers.get(worker.info.id)
        return now is not None and now.info.role is worker.info.role and self.is_trusted(now)

    def unfit(self, spec: SequenceSpec) -> dict[str, set[str]]:
        """Return the workers that do not know all fields that the sequence sets -> the unknown fields."""
        if not self._lacking:
            return {}
        used = wire.fields_of(spec)
        return {worker_id: unknown for worker_id, fields in self._lacking.items() if (unknown := used & fields)}

    @property
    def without_adapters(self) -> frozenset[str]:
        """Ids of the workers that serve no adapters."""
        return self._without_adapters

    def loads_s(self, adapter: Adapter, among: Iterable[str] | None = None) -> dict[str, float]:
        """Return the workers that would have to load an adapter, with the time for it in seconds.

        Workers that were sent a request for it shortly before count as holding it.

        Args:
            among: ids of the workers to look at; None: all of them.
        """
        digest, now, found = adapter.digest, self._clock(), {}
        for worker_id in self._workers if among is None else among:
            worker = self._workers[worker_id]
            info, load = worker.info, worker.load
            if not info.max_adapters or digest in load.adapters:
                continue
            if self._loading.get((worker_id, info.epoch, digest), 0.0) <= now:
                found[worker_id] = load.adapter_load_s or ADAPTER_LOAD_S
        return found

    def loads(self, worker: Worker, adapter: Adapter) -> None:
        """Record that a worker gets a request for an adapter, and so will hold it before its lease says so."""
        if adapter.digest not in worker.load.adapters and len(self._loading) < MAX_LOADING:
            what = worker.info.id, worker.info.epoch, adapter.digest
            self._loading.setdefault(what, self._clock() + LOADING_S)  # not renewed: loading may have failed
            if self._orders is not None:
                self._holders.setdefault(adapter.digest, {})[worker.info.id] = None

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the workers' samplers; an empty name stands for workers that do not report theirs."""
        return self._samplers

    @property
    def image_placeholder(self) -> int | None:
        """Token that stands for an image in a rendered chat; None: no worker takes images."""
        return self._image_placeholder

    def alike(self, candidates: Sequence[Candidate], only: str | None = None) -> list[Sequence[Candidate]]:
        """Group the candidates by sampler, because only workers of one sampler may share an answer that is drawn.

        KV transfers, migrations and retries within a group then give the same tokens as a single worker.

        Args:
            only: the sampler that has drawn a part of the answer; None: nothing is drawn yet.
        """
        names = self._samplers if only is None else (only,)
        if names == self._samplers and len(names) < 2:  # the usual case
            return [candidates]
        return [[c for c in candidates if self._workers[c.worker_id].info.sampler == name] for name in names]

    def unable(self, spec: SequenceSpec) -> set[str]:
        """Return the workers that cannot serve a sequence.

        Such a worker has no room for the prompt and `max_tokens`, although `max_model_len` allows them, or it takes no
        images and the prompt has some.
        """
        num_tokens = spec.num_prompt_tokens + spec.max_tokens
        short = {worker_id for worker_id, length in self._short.items() if length < num_tokens}
        return short | self._blind if spec.images else short

    def with_room(self, num_tokens: int, excluded: Collection[str]) -> set[str]:
        """Return the decode workers that, by their latest reports, have room for `num_tokens` if no prefix is cached.

        In a large pool, it returns at most `MAX_WITH_ROOM` of them, out of those with the least KV.
        """
        books = self._ready if self._orders is None else self._orders.least_kv(self._clock())
        with_room = (
            book.worker_id
            for book in books
            if book.candidate.role is Role.DECODE
            and book.candidate.room_tokens >= num_tokens
            and self._is_open(book, excluded)
        )
        return set(with_room if self._orders is None else islice(with_room, MAX_WITH_ROOM))

    def is_trusted(self, worker: Worker) -> bool:
        """Return whether a worker takes work, is not suspected and does not leave its role."""
        return worker.load.state is WorkerState.READY and self._is_trusted(worker.info.id, worker.info.epoch)

    def _is_trusted(self, worker_id: str, epoch: int) -> bool:
        now = self._clock()
        if self._suspects.get((worker_id, epoch), 0.0) > now:
            return False
        role = self._workers[worker_id].info.role
        return self._leaving.get((worker_id, epoch, role), 0.0) <= now

    def is_ready(self, role: Role) -> bool:
        """Return whether a worker of this role takes work."""
        return any(w.info.role is role and self.is_trusted(w) for w in self._workers.values())

    def candidates(
        self,
        prompt: Prompt,
        turn: Turn,
        excluded: Collection[str] = (),
        *,
        wanted: Iterable[str] = (),
        num_doubted: int = 0,
    ) -> list[Candidate]:
        """Return the workers that could serve a request now or be the source of its prefix, with their prefix hits.

        Of many workers, these are those with the least load of each role and sampler, those that hold most of the
        prompt, and those that are wanted, in an order of the session. The result is valid until the next call.

        Args:
            turn: the request's turn; see `router.placement.Turn`.
            wanted: ids of workers that are not left out because there are many.
            num_doubted: number of workers that the request rather avoids; there are so many more in the result.
        """
        size, num_tokens = self._block_size, prompt.num_tokens
        if self._resumes_anywhere:
            held = self._lookup(prompt.block_keys)
        else:  # the prefix is shorter than the prompt, because the last token must be computed
            held = self._lookup(prompt.block_keys[: (num_tokens - 1) // size], resumes_anywhere=False)
        now = self._clock()
        if self._orders is None:
            books: Iterable[LoadTracker] = self._all(excluded)
        else:
            session, is_open = session_of(prompt), self._openness(excluded)
            owners = held.longest(MAX_HOLDERS, session) if isinstance(held, Owners) else held
            least = self._orders.least(turn, session, now, is_open, LEAST_LOADED + num_doubted)
            examined = dict.fromkeys(least)
            others = (book for name in chain(owners, wanted) if (book := self._by_id.get(name)))
            examined |= {book: None for book in others if not book.candidate.takes_work or is_open(book)}
            books = examined
        if not held:
            return [book.seen(turn, 0, now) for book in books]
        number_of = held.number if isinstance(held, Owners) else held.get
        if self._resumes_anywhere:
            return [
                book.seen(turn, min((number_of(book.worker_id) or 0) * book.block_size, num_tokens), now)
                for book in books
            ]
        return [
            book.seen(turn, (number_of(book.worker_id) or 0) * size // book.block_size * book.block_size, now)
            for book in books
        ]

    def _all(self, excluded: Collection[str]) -> list[LoadTracker]:
        """Return the workers that could serve a request, and those that are only sources of prefixes."""
        ready = self._ready
        if excluded or self._suspects or self._leaving:
            ready = [book for book in ready if self._is_open(book, excluded)]
        return ready + self._draining if self._draining else ready

    def _is_open(self, book: LoadTracker, excluded: Collection[str]) -> bool:
        return book.worker_id not in excluded and self._is_trusted(book.worker_id, book.epoch)

    def _openness(self, excluded: Collection[str]) -> Callable[[LoadTracker], bool]:
        if excluded or self._suspects or self._leaving:
            return lambda book: self._is_open(book, excluded)
        return lambda book: True

    @property
    def is_large(self) -> bool:
        """True if requests consider few of the workers."""
        return self._orders is not None

    def with_adapter(self, adapter: Adapter | None, prompt: Prompt) -> list[str]:
        """Return workers that hold a request's adapter or are loading it, as `wanted` candidates.

        It returns none of few workers, because all of them are candidates.
        """
        holders = list(self._holders.get(adapter.digest, ())) if adapter is not None else []
        if len(holders) > MAX_HOLDERS:  # different sessions get different ones
            begin = session_of(prompt) % len(holders)
            holders = (holders[begin:] + holders[:begin])[:MAX_HOLDERS]
        return holders

    def for_images(self, role: Role, seed: int) -> list[Worker]:
        """Return the trusted workers that take images: those of a role, or if it has none, all.

        Of many workers it returns a sample, which the seed determines and which hardly changes when workers come or go.
        """
        if self._orders is None:
            found = [worker for worker in self.workers if worker.info.takes_images and self.is_trusted(worker)]
            return [worker for worker in found if worker.info.role is role] or found
        if not self._rings:
            ready = [(book.place, self._workers[book.worker_id]) for book in self._ready]
            takers = sorted(((place, worker) for place, worker in ready if worker.info.takes_images), key=itemgetter(0))
            rings = {each: [entry for entry in takers if entry[1].info.role is each] for each in Role}
            self._rings = {each: ring or takers for each, ring in rings.items()}
        ring, found = self._rings[role], []
        for _ in range(MAX_HOLDERS if ring else 0):
            seed = xxhash.xxh64_intdigest(seed.to_bytes(8, "little"))
            found.append(ring[bisect_left(ring, seed, key=itemgetter(0)) % len(ring)][1])
        return [worker for worker in dict.fromkeys(found) if self.is_trusted(worker)]

    def wait_s(self, worker: Worker, turn: Turn) -> float:
        """Return the time to compute a worker's queued prompts whose turn is not after `turn`, in seconds."""
        return self._loads[worker.info.id, worker.info.epoch].wait_s(turn, self._clock())

    @contextlib.contextmanager
    def computing(self, worker: Worker, job: Job) -> Iterator[None]:
        """Context manager: counts the job's prompt as queued on a worker's incarnation."""
        book = self._loads.get((worker.info.id, worker.info.epoch))
        if book is not None:
            book.queue(job, self._clock())
        try:
            yield
        finally:
            if book is not None:
                book.computed(job, self._clock())

    def computed(self, job: Job) -> None:
        """Record that the job's prompt is computed, before its `computing` exits; idempotent."""
        if job.queued_at is not None:
            job.queued_at.computed(job, self._clock())

    @contextlib.contextmanager
    def decoding(self, worker: Worker, job: Job) -> Iterator[None]:
        """Context manager: counts the job's sequence as decoding on a worker's incarnation."""
        book = self._loads.get((worker.info.id, worker.info.epoch))
        if book is not None:
            book.decode(job, self._clock())
        try:
            yield
        finally:
            if book is not None:
                book.finished(job, self._clock())


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Limits and usual values of the costs that workers report."""

    least: StepCosts = PRIOR
    """Lowest plausible costs."""
    usual: Mapping[Role, StepCosts] = field(default_factory=dict)
    """Typical costs in each role, of which each is plausible. What a pool has not measured is typical of the other."""

    @classmethod
    async def of(cls, workers: Collection[Worker]) -> _Bounds:
        least = least_of([worker.load.costs for worker in workers])
        await asyncio.sleep(0)
        anywhere = typical([lifted(worker.load.costs, least) for worker in workers])
        usual = {}
        for role in Role:
            await asyncio.sleep(0)
            usual[role] = typical([lifted(w.load.costs, least) for w in workers if w.info.role is role], anywhere)
        await asyncio.sleep(0)
        return cls(least, usual)


def _bounded(worker: Worker, least: StepCosts) -> Worker:
    """Return the worker with its costs raised to the lowest plausible ones."""
    costs = lifted(worker.load.costs, least)
    return worker if costs is worker.load.costs else replace(worker, load=replace(worker.load, costs=costs))


def _upper_median(lengths: Sequence[int]) -> int:
    return sorted(lengths)[len(lengths) // 2] if lengths else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Expected prefix hit of a prompt on the worker that computes it."""

    worker_id: str
    block_size: int
    keys: tuple[bytes, ...]
    """Keys of the leading blocks that the worker is expected to hold and can use."""
    as_of: Position | None
    """Position of the mirror in the worker's events; None: the mirror did not know the worker."""

    num_tokens: int
    """Number of leading tokens that placement expected."""


class HintTracker:
    """Compares the prefix hits that placement expected with those that workers report.

    The worker that computes a prompt reports how much of it was cached. If that is less than expected, the hint was
    stale. The router counts it and removes the wrong entries from its mirror, unless newer events of the worker have
    arrived.
    """

    def __init__(self, mirror: Mirror, instruments: Instruments) -> None:
        self._mirror = mirror
        self._instruments = instruments

    def note(self, spec: SequenceSpec, prompt: Prompt, worker: Worker, num_believed_tokens: int) -> Hint:
        """Record a hint. Call this before the mirror changes after the placement."""
        # The last token is always computed. A continued answer gets an empty hint, because workers report the hit of
        # the prompt alone but the pulled tokens of the whole sequence.
        num_tokens = 0 if spec.is_continued else min(num_believed_tokens, spec.num_prompt_tokens - 1)
        info = worker.info
        keys = prompt.block_keys[: num_tokens // info.block_size]
        return Hint(
            worker_id=info.id,
            block_size=info.block_size,
            keys=keys,
            as_of=self._mirror.position(info.id),
            num_tokens=num_believed_tokens,
        )

    def settle(self, hint: Hint, num_found_tokens: int) -> None:
        """Check a hint against a worker's report.

        Args:
            num_found_tokens: number of leading prompt tokens that the worker held, without those that it pulled.
        """
        stale = hint.keys[num_found_tokens // hint.block_size :]
        if not stale:
            return
        self._instruments.stale_hints.add(1)
        self._instruments.stale_tokens.add(len(stale) * hint.block_size)
        self._mirror.disbelieve(hint.worker_id, hint.as_of, stale)
