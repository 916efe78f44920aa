"""The router's own placement and admission, as a placer of the arena."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.cluster import BlockCounts, Role, Worker, WorkerInfo, WorkerLoad, WorkerState
from baton.costs import believed, typical
from baton.errors import Overloaded
from kvstore.index import Owners
from lab.simulate.policy import RoutingDecision
from lab.simulate.views import PoolViews
from lab.simulate.worker import key_of
from router.admission import AnswerHistory, Gate, QueueEntry
from router.admission.tenants import DEFAULT_TENANT
from router.placement import Candidate, Job, LoadTracker, Objective, Prices, Prompt, Residence, Turn, Weights, place
from router.placement.load import LoadOrders
from router.placement.policy import session_of
from router.placement.pool_view import MAX_HOLDERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.config import RouterConfig
    from baton.costs import StepCosts
    from lab.simulate.policy import WorkerView
    from lab.simulate.worker import SimulatedWorker
    from lab.traces.trace import TraceRequest

REPORT_S = 1.0
"""Interval at which workers report the costs of their steps, in seconds."""
UNLIMITED_TOKENS = 10**9
"""Limit of a request's output length, which a trace does not contain."""


@dataclass(frozen=True, slots=True)
class _Placed:
    entry: QueueEntry
    job: Job


class Production:
    """`router.placement` behind `router.admission`, with a router's settings.

    Args:
        prices: costs of transferring KV.
        error: factor by which predictions of steps differ from the workers' measurements.
        knows_lengths: whether requests ask for exactly the number of tokens that they get.
    """

    name = "baton"

    def __init__(
        self,
        config: RouterConfig,
        objective: Objective,
        prices: Prices,
        error: float = 1.0,
        *,
        knows_lengths: bool = False,
    ) -> None:
        self._config = config
        self._objective = objective
        self._prices = prices
        self._error = error
        self._knows_lengths = knows_lengths
        slo = config.slo_class("")
        self._weights = Weights(slo.affinity_weight, slo.interference_weight)
        self._gate = Gate()
        self._history = AnswerHistory(config.expected_output_floor, config.expected_output_default)
        self._residence = Residence()
        self._loads: dict[int, LoadTracker] = {}
        self._costs: dict[int, StepCosts] = {}
        """Step costs of each worker, as of its latest report."""
        self._next_report_s: dict[Role, float] = {}
        self._pools: dict[Role, Sequence[SimulatedWorker]] = {}
        """Ready workers of large pools, as of the last placement."""
        self._orders = LoadOrders()
        """Orders of these workers."""
        self._placed: dict[int, _Placed] = {}
        """Placements of requests, by the identity of the request."""
        self._admit: set[int] = set()
        """Identities of requests that were admitted and are placed again."""

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> RoutingDecision | None:
        config = self._config
        at_most = request.num_output_tokens if self._knows_lengths else UNLIMITED_TOKENS
        expected = self._history.expect(DEFAULT_TENANT.id, at_most, self._knows_lengths)
        prompt = Prompt(request.num_prompt_tokens, tuple(map(key_of, request.block_ids[:2])), expected)
        if isinstance(decode, PoolViews):
            candidates = self._few(prompt, (0, False), {Role.PREFILL: prefill, Role.DECODE: decode}, now_s)
        else:
            books = [*self._loads_of(prefill, Role.PREFILL, now_s), *self._loads_of(decode, Role.DECODE, now_s)]
            views = [*prefill, *decode]
            candidates = [
                book.seen((0, False), view.num_cached_tokens, now_s) for book, view in zip(books, views, strict=True)
            ]
        placement = place(
            prompt,
            candidates,
            config.mode,
            objective=self._objective,
            weights=self._weights,
            prices=self._prices,
            pull_above_tokens=config.pull_above_tokens,
            rotates=not isinstance(decode, PoolViews),
        )
        assert placement is not None, "every pool has a worker"
        entry = QueueEntry(tenant=DEFAULT_TENANT, priority=0, ttft_s=self._objective.ttft_s)
        prediction = placement.prediction
        computes, decodes = int(placement.computes), int(placement.decode_worker)
        entry.is_placed(placement)
        if entry.turn[1]:
            wait_s = self._loads[computes].wait_s(entry.turn, now_s)
            prediction = replace(prediction, wait_s=wait_s)
        try:
            victims = self._gate.admit(entry, prediction)
        except Overloaded:
            if id(request) not in self._admit:
                return None
            victims = []
        self._admit.discard(id(request))
        assert not victims, "a trace has one tenant and one priority"
        job = Job(
            turn=entry.turn,
            compute_s=entry.compute_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_expected_tokens=expected,
        )
        self._loads[computes].queue(job, now_s)
        self._loads[decodes].decode(job, now_s)
        self._placed[id(request)] = _Placed(entry, job)
        source = int(placement.source) if placement.source else None
        return RoutingDecision(
            computes=computes,
            decodes=decodes,
            source=source,
            source_tokens=placement.source_tokens,
            ttft_s=self._objective.ttft_s,
            itl_s=self._objective.itl_s,
            num_expected_tokens=expected,
        )

    def computed(self, request: TraceRequest, now_s: float) -> None:
        placed = self._placed[id(request)]
        self._gate.left(placed.entry)
        if placed.job.queued_at:
            placed.job.queued_at.computed(placed.job, now_s)

    def finished(self, request: TraceRequest, now_s: float) -> None:
        self.computed(request, now_s)
        self._leave(self._placed.pop(id(request)).job, now_s)
        self._history.observe(DEFAULT_TENANT.id, request.num_output_tokens)

    def withdrawn(self, request: TraceRequest, now_s: float) -> None:
        self.computed(request, now_s)
        self._leave(self._placed.pop(id(request)).job, now_s)
        self._admit.add(id(request))

    def moved(self, request: TraceRequest, decodes: int, now_s: float) -> None:
        job = self._placed[id(request)].job
        self._leave(job, now_s)
        self._loads[decodes].decode(job, now_s)

    @staticmethod
    def _leave(job: Job, now_s: float) -> None:
        if job.decoding_at:
            job.decoding_at.finished(job, now_s)

    def _few(
        self, prompt: Prompt, turn: Turn, pools: Mapping[Role, Sequence[WorkerView]], now_s: float
    ) -> list[Candidate]:
        """Return candidates of large pools, as `PoolView` does."""
        views = {role: each for role, each in pools.items() if isinstance(each, PoolViews)}
        is_changed = any(self._pools.get(role) is not each.workers for role, each in views.items())
        for role, each in views.items():
            if is_changed or now_s >= self._next_report_s.get(role, 0.0):
                self._loads_of(each, role, now_s)
        if is_changed:
            self._pools = {role: each.workers for role, each in views.items()}
            ready = [self._loads[worker.index] for each in views.values() for worker in each.workers]
            self._orders.adopt(ready, now_s)
        session, held = session_of(prompt), views[Role.DECODE].lookup()
        owners = held.longest(MAX_HOLDERS, session) if isinstance(held, Owners) else held
        books = dict.fromkeys(self._orders.least(turn, session, now_s, lambda book: True))
        books |= {book: None for index in map(int, owners) if (book := self._loads[index]) in self._orders}
        return [
            book.seen(turn, views[book.candidate.role].num_cached_tokens(int(book.worker_id)), now_s) for book in books
        ]

    def _loads_of(self, pool: Sequence[WorkerView], role: Role, now_s: float) -> list[LoadTracker]:
        joined = any(view.index not in self._costs for view in pool)
        if joined or now_s >= self._next_report_s.get(role, 0.0):
            self._next_report_s[role] = now_s + REPORT_S
            usual = typical([view.costs for view in pool])
            self._costs |= {view.index: _times(believed(view.costs, usual), self._error) for view in pool}
        return [self._book(view, role) for view in pool]

    def _book(self, view: WorkerView, role: Role) -> LoadTracker:
        book = self._loads.get(view.index)
        if book is None or book.candidate.role is not role:
            info = WorkerInfo(
                id=str(view.index),
                role=role,
                address="",
                pid=0,
                node="",
                epoch=0,
                content_id="",
                wire_compat="",
                block_size=view.block_tokens,
                max_model_len=UNLIMITED_TOKENS,
                chunk_tokens=view.chunk_tokens,
            )
            blocks = BlockCounts(total=view.num_blocks)
            worker = Worker(info, WorkerLoad(state=WorkerState.READY, blocks=blocks))
            if book is None:
                book = self._loads[view.index] = LoadTracker.of(worker, self._residence)
            else:
                book.report(worker)
        book.candidate.costs = self._costs[view.index]
        return book


def _times(costs: StepCosts, factor: float) -> StepCosts:
    if factor == 1:
        return costs
    return replace(costs, **{name: getattr(costs, name) * factor for name in costs.__dataclass_fields__})
