"""Holds the requests of models that sleep until the models are awake, so that clients need not retry.

`Waker` (`router.serve.waking`) asks the controller to wake the model. When a decode worker is ready, the held requests
get slots of the limiter: those of the highest priority first, then in the order of their arrival. Requests that get no
slot wait for the next free one, so a router may hold more requests than it may serve at a time.

    slot, claim, held = await holding.until_awake(request_id, num_choices, claim, prompt_bytes(request.prompt))
    with slot:
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

from baton.api import PromptInput, TokenIds
from baton.cluster import ModelState
from baton.config import RouterConfig
from baton.errors import BatonError, ModelWaking, NoWorker, RouterStopping
from baton.tasks import Flag
from router.admission import Claim, Limiter
from router.placement.pool_view import PoolView
from router.serve.waking import Waker
from router.timeline.events import Held

BATCH = 32
"""Maximum number of requests that are released before other tasks run."""
TOKEN_BYTES = 36
"""Memory of a token id in a tuple."""


class Release(NamedTuple):
    """A held request that has got its slots and continues."""

    slot: AbstractContextManager[object]
    """Slots of the limiter, as a context manager that frees them."""
    claim: Claim
    """The claim of the request from now on."""
    event: Held


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A held request."""

    order: tuple[int, int]
    """Held requests are released in this order: by priority, then by arrival."""
    request_id: str
    num_choices: int
    claim: Claim
    num_bytes: int
    slot: ExitStack | None = None
    """Slots of the limiter; None: the request is held."""
    error: BatonError | None = None
    """Error with which it ends; None: it is held, or has its slots."""
    is_over: Flag
    """Set when it is no longer held."""

    def end(self, error: BatonError) -> None:
        """End the request with an error."""
        self.error = error
        self.is_over.set()


class HeldRequests:
    """Places for held requests of one router, for all of its models. One tenant may have half of them."""

    def __init__(self, config: RouterConfig, limiter: Limiter) -> None:
        self.limiter = limiter
        self._max_num = config.max_held
        self._max_bytes = config.held_bytes
        self._num: Counter[str] = Counter()
        """Held requests by tenant; tenants without any are not listed."""
        self._bytes: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Number of held requests, of all models."""
        return self._num.total()

    @property
    def num_bytes(self) -> int:
        """Size of their prompts."""
        return self._bytes.total()

    def has_place(self, tenant_id: str, num_bytes: int) -> bool:
        """Return whether one more request of a tenant may be held."""
        return (
            self.num_held < self._max_num
            and self._num[tenant_id] < max(1, self._max_num // 2)
            and self.num_bytes + num_bytes <= self._max_bytes
            and self._bytes[tenant_id] + num_bytes <= self._max_bytes // 2
        )

    def take(self, tenant_id: str, num_bytes: int) -> None:
        """Take the place of one request."""
        self._num[tenant_id] += 1
        self._bytes[tenant_id] += num_bytes

    def free(self, tenant_id: str, num_bytes: int) -> None:
        """Free the place of one request."""
        self._num[tenant_id] -= 1
        self._bytes[tenant_id] -= num_bytes
        if not self._num[tenant_id]:
            del self._num[tenant_id], self._bytes[tenant_id]


class Holding:
    """The held requests of one model.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        pools: PoolView,
        held: HeldRequests,
        waker: Waker,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._held = held
        self._waker = waker
        self._config = config
        self._clock = clock
        self._waiting: list[_Waiting] = []
        """Held requests, in the order of their release."""
        self._numbers = itertools.count()
        self._down_since_s: float | None = None
        """Time since which the model is down while requests are held; None: it is not down, or none are held."""
        self._is_releasing = False
        """True if `_release` is about to run."""

    @property
    def is_needed(self) -> bool:
        """True if the model sleeps or wakes, so that requests must be held."""
        return self._pools.sleeps

    @property
    def num_held(self) -> int:
        """Number of held requests of this model."""
        return len(self._waiting)

    async def until_awake(self, request_id: str, num_choices: int, claim: Claim, num_bytes: int) -> Release:
        """Hold a request until its model is awake and the limiter has slots for it.

        Call this only if `is_needed`. The caller must enter the slot at once. The request's deadlines count from its
        release, so the caller must use those of the returned claim.

        Args:
            num_bytes: size of the prompt, see `prompt_bytes`.

        Raises:
            ModelWaking: too many requests are held.
            NoWorker: the model was not awake in time.
            RouterStopping: see `stop`.
            InvalidRequest: see `Limiter.slot`.
        """
        self._held.limiter.check(num_choices)
        self._waker.ask()  # also for a request that cannot be held, because its client comes back
        tenant_id, began_s = claim.tenant.id, self._clock()
        if not self._held.has_place(tenant_id, num_bytes):
            raise ModelWaking(
                "the model wakes, and the router holds as many requests as it may (router.max_held, router.held_bytes);"
                " try again later",
                self._waker.left_s,
            )
        waiting = _Waiting(
            order=(-claim.priority, next(self._numbers)),
            request_id=request_id,
            num_choices=num_choices,
            claim=claim,
            num_bytes=num_bytes,
            is_over=Flag(),
        )
        insort(self._waiting, waiting, key=lambda each: each.order)
        self._held.take(tenant_id, num_bytes)
        self._look()
        is_released = False
        try:
            await self._wait(waiting)
            if waiting.error is not None:
                raise waiting.error
            assert waiting.slot is not None
            is_released = True
        finally:
            self._remove(waiting)
            if waiting.slot is not None and not is_released:  # cancelled after its release
                waiting.slot.close()
        now_s = self._clock()
        return Release(waiting.slot, claim.released(now_s), Held(now_s, now_s - began_s))

    def stop(self) -> None:
        """End all held requests with RouterStopping."""
        for each in self._waiting:
            each.end(RouterStopping())

    async def _wait(self, waiting: _Waiting) -> None:
        """Wait until a request is no longer held. While the model is awake, the wait for slots has no limit."""
        while not waiting.is_over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.wake_wait_s):
                    await waiting.is_over.wait()
            if not waiting.is_over.is_set() and self._pools.state is not ModelState.READY:
                raise self._waker.why_asleep()

    def _remove(self, waiting: _Waiting) -> None:
        """Free the place of a request that is no longer held; idempotent."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._held.free(waiting.claim.tenant.id, waiting.num_bytes)

    def _look(self) -> None:
        """Release the held requests, end them or ask for a wake-up, now and after each change of the pools."""
        if not self._waiting:
            self._down_since_s = None
            return
        state = self._pools.state
        if state is not ModelState.DOWN:
            self._down_since_s = None
        match state:
            case ModelState.READY:
                self._release_soon()
            case ModelState.DOWN:
                self._is_down()
            case _:
                self._waker.ask()
        self._pools.on_change(self._look)

    def _is_down(self) -> None:
        now_s = self._clock()
        if self._down_since_s is None:
            self._down_since_s = now_s
        if now_s - self._down_since_s >= self._config.worker_wait_s:
            reason = f"no worker became ready within {self._config.worker_wait_s:g} s after the model's sleep ended"
            for each in self._waiting:
                each.end(NoWorker(f"{reason}; `baton status` shows its pools"))

    def _release_soon(self) -> None:
        if not self._is_releasing:
            self._is_releasing = True
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        """Release the next held requests for which the limiter has slots."""
        self._is_releasing = False
        if self._pools.state is not ModelState.READY:
            return
        limiter, num_released, crowded = self._held.limiter, 0, set[str]()
        for each in list(self._waiting):
            tenant = each.claim.tenant
            if each.error is not None or tenant.id in crowded:
                continue
            if not limiter.has_room(each.num_choices, tenant):
                crowded.add(tenant.id)  # its later requests must not overtake this one
                continue
            if num_released == BATCH:
                self._release_soon()
                return
            self._remove(each)
            self._grant(each)
            num_released += 1
        if self._waiting:
            limiter.on_room(self._release_soon)

    def _grant(self, waiting: _Waiting) -> None:
        """Take the slots now on behalf of a request, so that no newer request can take them first."""
        slot = ExitStack()
        try:
            slot.enter_context(self._held.limiter.slot(waiting.request_id, waiting.num_choices, waiting.claim.tenant))
        except BatonError as error:  # another request of its tenant has the same id
            waiting.end(error)
            return
        waiting.slot = slot
        waiting.is_over.set()


def prompt_bytes(prompt: PromptInput) -> int:
    """Return the approximate memory of a prompt."""
    if isinstance(prompt, TokenIds):
        return TOKEN_BYTES * len(prompt.ids)
    num_bytes = 0
    stack: list[object] = [prompt]
    while stack:
        part = stack.pop()
        if isinstance(part, str | bytes):
            num_bytes += sys.getsizeof(part)
        elif isinstance(part, Mapping):
            stack += part.keys()
            stack += part.values()
        elif isinstance(part, list | tuple):
            stack += part
        elif is_dataclass(part):
            stack += (getattr(part, field.name) for field in fields(part))
    return num_bytes
