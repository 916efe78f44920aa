"""Admits requests whose first token is predicted to come in time, and no more of them than the router serves at once.

`Limiter` limits the number of choices that the router serves at once, in total and by tenant. `AnswerHistory` estimates
the length of answers from earlier answers, which placement plans with. `Gate` judges by placement's prediction.

The prediction comes from placement, for the worker that it would choose. A request that the queue would make late is
refused at once, with the seconds until it would be on time. The exception is a queue with prompts of a tenant that uses
more than its share (weighted max-min fairness, in seconds of computing): these prompts are preempted, newest first,
until the new request is on time. A request never waits for one of a lower priority, which the workers compute later.

If a prompt alone takes longer than its objective, even on an idle worker, refusing others cannot help. It is computed
when nothing else waits, and refused only if its wait would exceed TTFT_DEADLINE_FACTOR objectives.

The gate has no clock and no queue: prompts wait on the workers, which compute them in the order of `Turn` and deadline.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.api import Chat, PromptInput
from baton.config import RouterConfig
from baton.errors import InvalidRequest, Overloaded
from baton.images import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_REQUEST_BYTES
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.placement import Placement, Prediction, Turn

TTFT_DEADLINE_FACTOR = 2.0
CAUTION = 0.8
"""Share of an objective's spare time that a predicted wait may use. Predictions err, and a queue that is a fifth
shorter keeps the workers just as busy."""
SMOOTHING = 0.1
"""Weight of the newest duration in the moving average."""
CROWDED = 0.8
"""Share of the limit up to which every tenant may take free slots; above it, each tenant is limited to its share."""
CROWDED_S = 30.0
"""Time after a refusal during which the router counts as crowded."""
REMEMBERED = 256
ENOUGH = 16
"""Number of answers from which a tenant's own history is used instead of the history of all tenants."""
QUANTILE = 0.9
NO_IMAGES: tuple[bytes, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """A choice that asks to be admitted."""

    tenant: Tenant
    priority: int
    ttft_s: float
    """Remaining time of its TTFT objective, in seconds."""
    was_held: bool = False
    """True if it was accepted before, see `Claim.was_held`: it is neither refused nor preempted."""
    worker_id: str = ""
    """The worker that would compute its prompt."""
    compute_s: float = 0.0
    turn: Turn = (0, False)
    """See `router.placement.Turn`."""

    def is_placed(self, placement: Placement) -> None:
        """Record the choice's placement."""
        self.worker_id = placement.computes
        self.compute_s = placement.prediction.pull_s + placement.prediction.compute_s
        self.turn = -self.priority, self.compute_s > self.ttft_s


class Gate:
    """Admission of one router's choices. An entry counts until `left`.

    Args:
        caution: see CAUTION.
    """

    def __init__(self, caution: float = CAUTION) -> None:
        self._caution = caution
        self._queues: dict[str, dict[QueueEntry, None]] = {}
        self._shares: defaultdict[str, float] = defaultdict(float)
        """Seconds of computing that each tenant has queued, by its weight."""
        self._num_entries: Counter[str] = Counter()

    def admit(self, entry: QueueEntry, prediction: Prediction) -> list[QueueEntry]:
        """Admit an entry that is placed.

        Returns:
            The entries that it preempts; they are removed already.

        Raises:
            Overloaded: its first token would come too late.
        """
        late_s = self._late_s(entry, prediction)
        # Preempting prompts does not free room to decode: only sequences that end do.
        may_shed = late_s > 0 and prediction.wait_s >= prediction.room_s
        victims = self._outranked(entry, late_s) if may_shed else []
        if late_s > 0 and not victims:
            raise Overloaded(
                f"the first token would come {late_s:.1f} s later than the objective of {entry.ttft_s:.1f} s allows; "
                "try again later",
                retry_after_s=max(0.1, late_s),
            )
        for victim in victims:
            self.left(victim)
        self._queues.setdefault(entry.worker_id, {})[entry] = None
        self._shares[entry.tenant.id] += entry.compute_s / entry.tenant.weight
        self._num_entries[entry.tenant.id] += 1
        return victims

    def left(self, entry: QueueEntry) -> None:
        """Remove an entry whose prompt is computed or that is cancelled; idempotent."""
        queue = self._queues.get(entry.worker_id, {})
        if entry in queue:
            del queue[entry]
            self._shares[entry.tenant.id] -= entry.compute_s / entry.tenant.weight
            self._num_entries[entry.tenant.id] -= 1
            if not self._num_entries[entry.tenant.id]:
                del self._shares[entry.tenant.id], self._num_entries[entry.tenant.id]

    def _late_s(self, entry: QueueEntry, prediction: Prediction) -> float:
        """Return the seconds by which the entry would be late; 0 or less: it is on time."""
        if entry.was_held or math.isinf(entry.ttft_s):
            return 0.0
        wait_s = max(prediction.wait_s, prediction.room_s)
        spare_s = entry.ttft_s - entry.compute_s
        return wait_s - (self._caution * spare_s if spare_s >= 0 else TTFT_DEADLINE_FACTOR * entry.ttft_s)

    def _outranked(self, entry: QueueEntry, late_s: float) -> list[QueueEntry]:
        """Return the entries to preempt so that `entry` is on time; none if that is not possible."""
        victims: list[QueueEntry] = []
        shares = self._shares.copy()
        mine = shares[entry.tenant.id] + entry.compute_s / entry.tenant.weight
        for other in reversed(self._queues.get(entry.worker_id, {})):
            if other.was_held:
                continue
            less_s = other.compute_s / other.tenant.weight
            over = other.tenant.id != entry.tenant.id and shares[other.tenant.id] - less_s >= mine
            if over and other.turn[0] == entry.turn[0] and other.turn <= entry.turn:
                victims.append(other)
                shares[other.tenant.id] -= less_s
                late_s -= other.compute_s
                if late_s <= 0:
                    return victims
        return []


class Limiter:
    """Counter of choices in flight. Beyond the limit it refuses requests at once, with the seconds until a retry."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.num_in_flight = 0
        self._request_ids: set[tuple[str, str]] = set()
        self._by_tenant: Counter[str] = Counter()
        """Choices in flight, by tenant; tenants without any are not listed."""
        self._weights: dict[str, float] = {}
        """Weights of the tenants above and below, as of their latest request: the tenants' file may change."""
        self._refused: set[str] = set()
        """Tenants refused since the router became crowded: free slots are kept for tenants below their share."""
        self._mean_duration_s = 1.0
        self._refused_s = -math.inf
        """Time of the latest refusal."""
        self._waiting: dict[Callable[[], object], None] = {}
        """Callbacks of the next free slot, in order."""

    @property
    def is_crowded(self) -> bool:
        """True if a request was refused within the last CROWDED_S seconds."""
        return time.monotonic() - self._refused_s < CROWDED_S

    @contextlib.contextmanager
    def slot(self, request_id: str, num_choices: int, tenant: Tenant = DEFAULT_TENANT) -> Iterator[None]:
        """Context manager: holds the slots of one request.

        Raises:
            Overloaded: the limit is reached, or it is near and the tenant has its share, by weight among the tenants
                in service. `retry_after_s` is the mean time until a slot is free.
            InvalidRequest: the tenant has a request of this id in flight.
        """
        self.check(num_choices)
        self._weights[tenant.id] = tenant.weight
        if not self.has_room(num_choices, tenant):
            self._refused.add(tenant.id)
            self._refused_s = time.monotonic()
            raise Overloaded(
                f"{self.num_in_flight} of at most {self.max_in_flight} answers are being generated, "
                f"{self._by_tenant[tenant.id]} of them yours; try again later",
                retry_after_s=max(0.1, self._mean_duration_s * num_choices / self.max_in_flight),
            )
        if (tenant.id, request_id) in self._request_ids:
            raise InvalidRequest(
                f"request_id {request_id!r} is in flight; choose another or leave it empty", "request_id"
            )
        self._request_ids.add((tenant.id, request_id))
        self._book(tenant.id, num_choices)
        try:
            yield
        finally:
            self._book(tenant.id, -num_choices)
            self._request_ids.discard((tenant.id, request_id))

    def check(self, num_choices: int) -> None:
        """Raise InvalidRequest if a request has more choices than there are slots."""
        if num_choices > self.max_in_flight:
            raise InvalidRequest(f"sampling.n must be at most {self.max_in_flight} here; lower it", "n")

    def has_room(self, num_choices: int, tenant: Tenant) -> bool:
        """Return whether `slot` would admit a request of this tenant now."""
        return self.num_in_flight + num_choices <= self._limit_of(tenant)

    def on_room(self, look: Callable[[], object]) -> None:
        """Call back once, when a slot becomes free. `look` must return at once, and leave the limiter as it is."""
        self._waiting[look] = None

    def _limit_of(self, tenant: Tenant) -> float:
        """Return the limit on choices in flight, over all tenants, that applies to a request of this tenant."""
        others = sum(self._weights[other] for other in self._by_tenant.keys() | self._refused if other != tenant.id)
        share = self.max_in_flight * tenant.weight / (tenant.weight + others)
        has_share = self._by_tenant[tenant.id] >= share
        return CROWDED * self.max_in_flight if has_share else self.max_in_flight

    def _book(self, tenant_id: str, num_choices: int) -> None:
        self.num_in_flight += num_choices
        self._by_tenant[tenant_id] += num_choices
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]
        if self.num_in_flight < CROWDED * self.max_in_flight:
            self._refused.clear()
        if num_choices < 0 and self._waiting:
            waiting, self._waiting = self._waiting, {}
            for look in waiting:
                look()

    def record(self, duration_s: float) -> None:
        """Record the duration of a finished request, for the estimate in refusals."""
        self._mean_duration_s += SMOOTHING * (duration_s - self._mean_duration_s)


class AnswerHistory:
    """Lengths of the latest answers, by tenant.

    Args:
        floor: minimum of the expected length, unless the request allows less.
        default: expected length until ENOUGH answers have been observed.
    """

    def __init__(self, floor: int, default: int) -> None:
        self._floor = floor
        self._default = default
        self._all: _Lengths = _Lengths()
        self._by_tenant: dict[str, _Lengths] = {}

    def observe(self, tenant_id: str, num_tokens: int) -> None:
        """Record the length of a completed answer."""
        self._all.add(num_tokens)
        self._by_tenant.setdefault(tenant_id, _Lengths()).add(num_tokens)

    def expect(self, tenant_id: str, max_tokens: int, ignore_eos: bool = False) -> int:
        """Return the number of tokens to plan for: nine of ten answers are not longer."""
        if ignore_eos:
            return max_tokens
        own = self._by_tenant.get(tenant_id)
        lengths = own if own is not None and own.num >= ENOUGH else self._all
        expected = lengths.quantile if lengths.num >= ENOUGH else self._default
        return min(max_tokens, max(self._floor, expected))


class _Lengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=REMEMBERED)
        self._num_new = 0
        self._quantile: int | None = None

    @property
    def num(self) -> int:
        return len(self._latest)

    def add(self, num_tokens: int) -> None:
        self._latest.append(num_tokens)
        self._num_new += 1
        if self._num_new >= ENOUGH:  # sorting after every answer would be expensive
            self._num_new, self._quantile = 0, None

    @property
    def quantile(self) -> int:
        if self._quantile is None:
            ordered = sorted(self._latest)
            self._quantile = ordered[min(self.num - 1, int(QUANTILE * self.num))]
        return self._quantile


class ImageMemory:
    """Memory of the images of one router's running requests. One tenant may have half of it."""

    def __init__(self, config: RouterConfig) -> None:
        self._max_images = min(config.max_images, MAX_IMAGES)
        self._max_bytes = min(config.max_image_bytes, MAX_IMAGE_BYTES)
        self._memory_bytes = config.image_memory_bytes
        self._held: Counter[str] = Counter()
        """Bytes by tenant; tenants without any are not listed."""

    @property
    def num_held_bytes(self) -> int:
        return self._held.total()

    @contextlib.contextmanager
    def holding(self, prompt: PromptInput, tenant_id: str) -> Iterator[tuple[bytes, ...]]:
        """Context manager: counts the images of a request while it runs, and yields them.

        Raises:
            InvalidRequest: they are too many, or too large.
            Overloaded: the images of running requests, of all tenants or of this one, take too much memory.
        """
        images = prompt.images if isinstance(prompt, Chat) else NO_IMAGES
        if not images:
            yield images
            return
        self._check(images)
        num_bytes = sum(map(len, images))
        if (
            self._held.total() + num_bytes > self._memory_bytes
            or self._held[tenant_id] + num_bytes > self._memory_bytes / 2
        ):
            raise Overloaded("the images of running requests take all memory for images; try again later")
        self._held[tenant_id] += num_bytes
        try:
            yield images
        finally:
            self._held[tenant_id] -= num_bytes
            if not self._held[tenant_id]:
                del self._held[tenant_id]

    def _check(self, images: tuple[bytes, ...]) -> None:
        if len(images) > self._max_images:
            raise InvalidRequest(f"the request has {len(images)} images; send at most {self._max_images}", "messages")
        longest, total = max(map(len, images)), sum(map(len, images))
        if longest > self._max_bytes:
            raise InvalidRequest(
                f"an image has {longest} bytes; send images of at most {self._max_bytes} bytes", "messages"
            )
        if total > (most := min(MAX_REQUEST_BYTES, self._memory_bytes // 2)):
            raise InvalidRequest(f"the images have {total} bytes together; send at most {most} bytes", "messages")
