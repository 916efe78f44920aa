"""Load of this router's process, and the alerts that a router raises itself, for the web page.

The alerts are those of helm/baton/rules whose data a router has. Names, severities, thresholds, windows and durations
equal those of the Prometheus rules, and a test compares them. Alerts that need more data exist only in Prometheus: six
hours of requests (BatonGoodputBurnsSlowly), the growth of counters (transfers, preemptions, failures), containers and
GPUs.

`conditions` is a pure function of a `RouterView`. An `AlertWatch` remembers how long each condition has lasted.

The load is that of processor, event loop, memory, files, connections, and answers in flight. One thread serves all
requests of a router. If that thread is busy all the time, the processor share approaches 1, the event loop lags, and
streams stutter. `/metrics` exports processor, memory and files as counters for Prometheus (`baton.telemetry.process`);
this module computes current values for the page.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import psutil

from baton.cluster import CertificateTerm, ClusterStatus, ModelState, ServedModel, Worker, WorkerState, with_role
from router.cluster.history import LATE_SLOTS, NUM_SLOTS, SLOT_S, ClusterHistory

PERIOD_S = 5.0
MINUTE_S, DAY_S = 60, 86_400
TICK_S = 0.25
"""Seconds between two measurements of the event loop. A block for longer is always detected."""
SHOWN_S = 10.0
"""Window of `cpu_share` and `loop_lag_s`, in seconds."""
LONG_S = 300.0
"""Window of `long_cpu_share`, which BatonRouterBusy uses, in seconds."""
NOTE_EVERY = 8
"""Number of ticks between two measurements of the processor time."""

Bounded = Callable[[], tuple[int, int]]
"""Returns a current number and its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """A router's own load."""

    cpu_share: float
    """Processors in use over the last `SHOWN_S`; near 1 the router is at its limit."""
    long_cpu_share: float
    """Processors in use over the last `LONG_S`."""
    loop_lag_s: float
    """The longest time by which the event loop was late, in the last `SHOWN_S`."""
    memory_bytes: int
    """Resident memory."""
    open_files: int
    max_files: int
    """0: there is no limit."""
    connections: int
    """Open connections to the HTTP port."""
    max_connections: int
    in_flight: int
    """Answers that are being generated, over HTTP and gRPC: a request counts once for each of its choices."""
    max_in_flight: int


class LoadMeter:
    """Measures the load while `run` runs.

    Args:
        connections: returns the open connections to the HTTP port.
        in_flight: returns the number of answers that are being generated.
        clock: monotonic time in seconds.
        cpu: processor time in seconds that all threads of the process have used.
    """

    def __init__(
        self,
        connections: Bounded,
        in_flight: Bounded,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._connections, self._in_flight = connections, in_flight
        self._clock, self._cpu = clock, cpu
        self._lags: deque[float] = deque(maxlen=round(SHOWN_S / TICK_S))
        self._noted: deque[tuple[float, float]] = deque(maxlen=round(LONG_S / (TICK_S * NOTE_EVERY)) + 1)
        """Pairs of a time and the processor time until then."""
        self._process = psutil.Process()
        self.note()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            for _ in range(NOTE_EVERY):
                before_s = self._clock()
                await asyncio.sleep(TICK_S)
                self._lags.append(max(0.0, self._clock() - before_s - TICK_S))
            self.note()

    def note(self) -> None:
        """Record the processor time; `run` does so every `NOTE_EVERY` ticks."""
        self._noted.append((self._clock(), self._cpu()))

    def now(self) -> RouterLoad:
        """Return the load as of now."""
        most_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections, max_connections = self._connections()
        in_flight, max_in_flight = self._in_flight()
        return RouterLoad(
            cpu_share=self._share(SHOWN_S),
            long_cpu_share=self._share(LONG_S),
            loop_lag_s=max(self._lags, default=0.0),
            memory_bytes=self._process.memory_info().rss,
            open_files=self._process.num_fds(),
            max_files=0 if most_files == resource.RLIM_INFINITY else most_files,
            connections=connections,
            max_connections=max_connections,
            in_flight=in_flight,
            max_in_flight=max_in_flight,
        )

    def _share(self, for_s: float) -> float:
        """Return the mean number of processors in use over the last `for_s`.

        Time before the first measurement counts as idle, so that loading the tokenizer at the start does not make a
        router look busy.
        """
        now_s, cpu_s = self._clock(), self._cpu()
        old = [each for each in self._noted if now_s - each[0] >= for_s]
        then_s, then_cpu_s = old[-1] if old else self._noted[0]
        return (cpu_s - then_cpu_s) / max(for_s, now_s - then_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """Severity, thresholds and duration of an alert. Its runbook page is docs/runbook/NAME.md."""

    severity: str
    """critical: an operator should act now. warning: an operator should act during working hours."""
    for_s: float = 0
    """Seconds for which its condition must last."""
    above: tuple[float, ...] = ()
    """Thresholds of its condition. For certificates: the minimum remaining seconds and share of the validity period."""
    windows_s: tuple[float, ...] = ()
    """Time windows, in seconds, over which requests or processor time are counted."""


RULES: Mapping[str, AlertRule] = {
    "BatonPoolEmpty": AlertRule(severity="critical", for_s=MINUTE_S, above=(0,)),
    "BatonModelDoesNotWake": AlertRule(severity="critical", for_s=5 * MINUTE_S),
    "BatonRedisDown": AlertRule(severity="critical", for_s=MINUTE_S, above=(0,)),
    "BatonRedisFull": AlertRule(severity="critical", for_s=5 * MINUTE_S, above=(0.85,)),
    "BatonCertificateExpiresNow": AlertRule(severity="critical", for_s=5 * MINUTE_S, above=(DAY_S, 0.05)),
    "BatonControllerDown": AlertRule(severity="critical", for_s=3 * MINUTE_S),
    "BatonSelfCheckFails": AlertRule(severity="critical", for_s=MINUTE_S),
    "BatonRequestsFail": AlertRule(severity="critical", for_s=5 * MINUTE_S, above=(0.01,), windows_s=(5 * MINUTE_S,)),
    "BatonGoodputBurnsFast": AlertRule(
        severity="critical",
        for_s=2 * MINUTE_S,
        above=(14.4 * 0.01, 14.4 * 0.01, 20),
        windows_s=(60 * MINUTE_S, 5 * MINUTE_S),
    ),
    "BatonRouterOutOfFiles": AlertRule(severity="critical", for_s=5 * MINUTE_S, above=(0.8,)),
    "BatonPoolBelowDesired": AlertRule(severity="warning", for_s=10 * MINUTE_S, above=(0,)),
    "BatonNoRoom": AlertRule(severity="warning", for_s=10 * MINUTE_S, above=(0,)),
    "BatonDrainStuck": AlertRule(severity="warning", for_s=10 * MINUTE_S),
    "BatonRequestsRefused": AlertRule(
        severity="warning", for_s=10 * MINUTE_S, above=(0.05,), windows_s=(10 * MINUTE_S,)
    ),
    "BatonFirstTokensLate": AlertRule(
        severity="warning", for_s=10 * MINUTE_S, above=(0.01,), windows_s=(10 * MINUTE_S,)
    ),
    "BatonTokensSlow": AlertRule(severity="warning", for_s=10 * MINUTE_S, above=(0.01,), windows_s=(10 * MINUTE_S,)),
    "BatonKVCacheFull": AlertRule(severity="warning", for_s=10 * MINUTE_S, above=(0.9,)),
    "BatonAutoscalerAtLimit": AlertRule(severity="warning", for_s=15 * MINUTE_S, above=(0.9,)),
    "BatonWireMismatch": AlertRule(severity="warning", for_s=30 * MINUTE_S, above=(1,)),
    "BatonMirrorLags": AlertRule(severity="warning", for_s=2 * MINUTE_S, above=(5,)),
    "BatonRouterBusy": AlertRule(severity="warning", for_s=10 * MINUTE_S, above=(0.95,), windows_s=(LONG_S,)),
    "BatonCertificateExpiresSoon": AlertRule(severity="warning", for_s=60 * MINUTE_S, above=(14 * DAY_S, 0.2)),
}
"""Alerts by name, in the order in which an operator should look at them."""

WINDOWS_S = frozenset(window_s for rule in RULES.values() for window_s in rule.windows_s)
Outcomes = Mapping[tuple[str, str], float]
"""Finished requests by outcome and SLO class."""
Condition = tuple[str, str, str]
"""Name of an alert, its subject (a pool, a worker, a class; empty: the cluster), and a sentence that describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """Input of `conditions`: the state of the cluster as one router sees it."""

    router_id: str
    now_s: float
    """Unix time."""
    status: ClusterStatus
    load: RouterLoad
    """The router's own load."""
    outcomes: Mapping[float, Outcomes]
    """Finished requests of all routers, by window of `RULES` in seconds."""


def _above(name: str) -> float:
    (threshold,) = RULES[name].above
    return threshold


def _window_s(name: str) -> float:
    (window_s,) = RULES[name].windows_s
    return window_s


def conditions(seen: RouterView) -> list[Condition]:
    """Return the conditions that hold, in the order of `RULES`."""
    found = [*_of_pools(seen), *_of_workers(seen), *_of_requests(seen), *_of_routers(seen), *_of_the_store(seen)]
    found += _of_certificates(seen)
    order = list(RULES)
    return sorted(found, key=lambda each: order.index(each[0]))


def _of_pools(seen: RouterView) -> Iterator[Condition]:
    models = seen.status.models
    for model in models:
        yield from _of_model(model, f"{model.release}/" if len(models) > 1 else "")


def _of_model(model: ServedModel, prefix: str) -> Iterator[Condition]:
    """Yield the conditions of one model's pools.

    Args:
        prefix: precedes the pools' names if there are several models.
    """
    is_waking = model.state is ModelState.WAKING
    for pool, sizes in model.pools.items():
        name = f"{prefix}{pool}"
        if sizes.ready == 0 and sizes.desired > 0 and not is_waking:
            yield "BatonPoolEmpty", name, f"Pool {name} has no worker that is ready"
        if sizes.desired - sizes.ready > 0:
            yield "BatonPoolBelowDesired", name, f"Pool {name} lacks {sizes.desired - sizes.ready} of its workers"
    if is_waking:
        yield "BatonModelDoesNotWake", prefix[:-1], f"{model.release} wakes, but no decode worker is ready yet"
    if model.controller is None:
        of_model = f" of {model.release}" if prefix else ""
        yield "BatonControllerDown", prefix[:-1], f"No controller manages the workers{of_model}"
        return
    for trouble in model.controller.trouble:
        if trouble.num_unplaced > 0:
            name = f"{prefix}{trouble.pool}"
            text = f"{trouble.num_unplaced} workers of pool {name} wait for a node with room"
            yield "BatonNoRoom", name, text
    most = _above("BatonAutoscalerAtLimit")
    for scaling in model.controller.scaling:
        found = model.pools.get(scaling.pool)
        if scaling.utilisation > most and found is not None and scaling.wanted <= found.desired:
            name = f"{prefix}{scaling.pool}"
            text = f"Pool {name} is at {scaling.utilisation:.0%} of its capacity, and the autoscaler adds no worker"
            yield "BatonAutoscalerAtLimit", name, text


def _of_workers(seen: RouterView) -> Iterator[Condition]:
    most_kv = _above("BatonKVCacheFull")
    models = seen.status.models
    prefixes = {model.content_id: f"{model.release}/" for model in models} if len(models) > 1 else {}
    for worker in seen.status.workers:
        label, load = prefixes.get(worker.info.content_id, "") + _label(worker), worker.load
        if load.self_check != "ok":
            yield "BatonSelfCheckFails", label, f"The integrity check of {label} fails: {load.self_check}"
        if load.state is WorkerState.DRAINING:
            yield "BatonDrainStuck", label, f"{label} is leaving"
        if load.blocks.total and load.blocks.in_use / load.blocks.total > most_kv:
            text = f"{label} has {load.blocks.in_use / load.blocks.total:.0%} of its KV cache in use"
            yield "BatonKVCacheFull", label, text
    kinds = defaultdict[str, set[str]](set)
    for worker in seen.status.workers:
        kinds[worker.info.content_id].add(worker.info.wire_compat)
    if (most := max(map(len, kinds.values()), default=0)) > _above("BatonWireMismatch"):
        yield "BatonWireMismatch", "", f"Workers of {most} kinds cannot transfer KV to each other"


def _label(worker: Worker) -> str:
    return with_role(worker.info.id, worker.info.role)


def _of_requests(seen: RouterView) -> Iterator[Condition]:
    yield from _of_burnt_goodput(seen)
    most = _above("BatonRequestsFail")
    counts = seen.outcomes[_window_s("BatonRequestsFail")]
    failed = sum(number for (outcome, _), number in counts.items() if outcome == "error")
    ended = sum(number for (outcome, _), number in counts.items() if outcome != "cancelled")
    if ended and failed / ended > most:
        yield "BatonRequestsFail", "", f"{failed / ended:.1%} of the requests end with an error"
    for name, outcome, among, text in (
        ("BatonRequestsRefused", "rejected", None, "of the requests of class {} are refused"),
        (
            "BatonFirstTokensLate",
            "ttft_missed",
            ANSWERED,
            "of the answers of class {} begin later than their objective",
        ),
        ("BatonTokensSlow", "itl_missed", ANSWERED, "of the answers of class {} come more slowly than their objective"),
    ):
        most, window_s = _above(name), _window_s(name)
        for of_class, share in _shares(seen.outcomes[window_s], outcome, among).items():
            if share > most:
                yield name, of_class, f"{share:.1%} {text.format(of_class)}"


ANSWERED = frozenset({"met", "ttft_missed", "itl_missed", "e2e_missed"})


def _shares(counts: Outcomes, outcome: str, among: frozenset[str] | None) -> dict[str, float]:
    """Return the share of an outcome among others, by class.

    Args:
        among: the outcomes that form the whole; None: all except cancelled.
    """
    part, whole = defaultdict[str, float](float), defaultdict[str, float](float)
    for (each, of_class), number in counts.items():
        part[of_class] += number if each == outcome else 0
        whole[of_class] += number if (each in among if among is not None else each != "cancelled") else 0
    return {of_class: part[of_class] / number for of_class, number in whole.items() if number > 0}


def _of_burnt_goodput(seen: RouterView) -> Iterator[Condition]:
    rule = RULES["BatonGoodputBurnsFast"]
    most_long, most_short, least_ended = rule.above
    long, short = (_missed(seen.outcomes[window_s]) for window_s in rule.windows_s)
    for of_class, (missed, ended) in long.items():
        now_missed, now_ended = short.get(of_class, (0, 0))
        if ended > least_ended and missed / ended > most_long and now_ended and now_missed / now_ended > most_short:
            text = f"{missed / ended:.1%} of the requests of class {of_class} missed their objectives in the last hour"
            yield "BatonGoodputBurnsFast", of_class, text


def _missed(counts: Outcomes) -> dict[str, tuple[float, float]]:
    """Return by class the number of requests that missed their objectives, and of all that were not cancelled."""
    missed, ended = defaultdict[str, float](float), defaultdict[str, float](float)
    for (outcome, of_class), number in counts.items():
        if outcome != "cancelled":
            ended[of_class] += number
            missed[of_class] += number if outcome != "met" else 0
    return {of_class: (missed[of_class], number) for of_class, number in ended.items()}


def _of_routers(seen: RouterView) -> Iterator[Condition]:
    most_lag_s = _above("BatonMirrorLags")
    for router in seen.status.routers:
        if router.mirror_lag_s > most_lag_s:
            text = f"Router {router.id} is {router.mirror_lag_s:.0f} s behind the prefix index"
            yield "BatonMirrorLags", router.id, text
    load, own = seen.load, seen.router_id
    most_cpu, most_files = _above("BatonRouterBusy"), _above("BatonRouterOutOfFiles")
    if load.long_cpu_share > most_cpu:
        yield "BatonRouterBusy", own, f"Router {own} uses {load.long_cpu_share:.0%} of a processor"
    if load.max_files and load.open_files / load.max_files > most_files:
        share = f"{load.open_files / load.max_files:.0%}"
        yield "BatonRouterOutOfFiles", own, f"Router {own} uses {share} of its file descriptors"


def _of_the_store(seen: RouterView) -> Iterator[Condition]:
    if not seen.status.redis_ok:
        yield "BatonRedisDown", seen.router_id, f"Redis is out of reach for router {seen.router_id}"
    memory, most = seen.status.store_memory, _above("BatonRedisFull")
    if memory is not None and memory.limit_bytes and memory.used_bytes / memory.limit_bytes > most:
        yield "BatonRedisFull", "", f"Redis has used {memory.used_bytes / memory.limit_bytes:.0%} of its memory"


def _of_certificates(seen: RouterView) -> Iterator[Condition]:
    for each in seen.status.certificates:
        for name in ("BatonCertificateExpiresNow", "BatonCertificateExpiresSoon"):
            if _is_near_its_end(each, seen.now_s, *RULES[name].above):
                yield name, each.name, f"The certificate of the {each.name} {_left(each.end_s - seen.now_s)}"


def _is_near_its_end(term: CertificateTerm, now_s: float, least_s: float, least_share: float) -> bool:
    left_s = term.end_s - now_s
    return left_s < least_s and left_s < least_share * (term.end_s - term.begin_s)


def _left(left_s: float) -> str:
    if left_s < 0:
        return "has expired"
    return f"expires in {left_s / DAY_S:.0f} days" if left_s > 2 * DAY_S else f"expires in {left_s / 3600:.1f} hours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that holds, and its duration."""

    name: str
    severity: str
    about: str
    summary: str
    since_s: float
    """Unix time at which this router first saw it."""
    for_s: float
    """Seconds for which it must last before the alert fires."""
    is_firing: bool
    """True if it has lasted that long."""


class AlertBook:
    """Record of when conditions started. `run` must run to keep it current.

    Args:
        look: returns the current conditions, as `conditions` does.
        clock: wall time in seconds.
    """

    def __init__(self, look: Callable[[], Iterable[Condition]], clock: Callable[[], float] = time.time) -> None:
        self._look = look
        self._clock = clock
        self._since_s: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Evaluate the conditions every `PERIOD_S` until cancelled."""
        while True:
            self.alerts()
            await asyncio.sleep(PERIOD_S)

    def alerts(self) -> list[Alert]:
        """Evaluate the conditions and return the alerts: firing ones first, and critical ones first among equals."""
        found, now_s = list(self._look()), self._clock()
        self._since_s = {(name, about): self._since_s.get((name, about), now_s) for name, about, _ in found}
        raised = [self._alert(condition, now_s) for condition in found]
        return sorted(raised, key=lambda each: (not each.is_firing, each.severity != "critical"))

    def _alert(self, condition: Condition, now_s: float) -> Alert:
        name, about, summary = condition
        rule, since_s = RULES[name], self._since_s[name, about]
        return Alert(
            name=name,
            severity=rule.severity,
            about=about,
            summary=summary,
            since_s=since_s,
            for_s=rule.for_s,
            is_firing=now_s - since_s >= rule.for_s,
        )


class AlertWatch:
    """Evaluator of a router's alert conditions. A call returns the current conditions.

    Args:
        status: returns the cluster's status as the router sees it.
        load: the router's own load.
        clock: wall time in seconds.
    """

    def __init__(
        self,
        router_id: str,
        status: Callable[[], ClusterStatus],
        load: LoadMeter,
        history: ClusterHistory,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._router_id, self._status, self._load, self._clock = router_id, status, load, clock
        self._outcomes = RecentOutcomes(history, clock)

    def __call__(self) -> list[Condition]:
        return conditions(
            RouterView(
                router_id=self._router_id,
                now_s=self._clock(),
                status=self._status(),
                load=self._load.now(),
                outcomes=self._outcomes.of(WINDOWS_S),
            )
        )


class RecentOutcomes:
    """Requests of the last hour by outcome and class, read from the history.

    Only the latest slots are read again, because adding up all of them each time would cost the router milliseconds.
    """

    def __init__(self, history: ClusterHistory, clock: Callable[[], float] = time.time) -> None:
        self._history = history
        self._clock = clock
        self._slots: dict[int, Outcomes] = {}

    def of(self, windows_s: Iterable[float]) -> dict[float, Outcomes]:
        """Return the outcomes of each window, by its length in seconds. The current slot counts in full."""
        newest = max(self._slots, default=0)
        for number, slot in self._history.slots(newest - LATE_SLOTS).items():
            self._slots[number] = _outcomes(slot.counts)
        now = int(self._clock() // SLOT_S)
        self._slots = {number: each for number, each in self._slots.items() if number > now - NUM_SLOTS}
        return {window_s: self._since(now - window_s / SLOT_S) for window_s in windows_s}

    def _since(self, slot: float) -> Outcomes:
        total: Counter[tuple[str, str]] = Counter()
        for number, each in self._slots.items():
            if number > slot:
                total.update(each)
        return total


def _outcomes(counts: Mapping[str, float]) -> dict[tuple[str, str], float]:
    found = {}
    for name, number in counts.items():
        kind, _, rest = name.partition("/")
        if kind == "requests":
            outcome, _, of_class = rest.partition("/")
            found[outcome, of_class] = number
    return found
