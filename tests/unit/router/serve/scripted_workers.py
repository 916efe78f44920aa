"""Workers that follow a script, and a real driver of theirs: what a stream goes through, in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from opentelemetry.context import Context

from baton import wire
from baton.cluster import Role, Worker, WorkerLoad
from baton.config import RouterConfig
from baton.errors import BatonError
from baton.kv_layout import KvLayout
from baton.messages import DecodeRequest, Event, FetchRequest, PrefillRequest, SequenceSpec, Ticket
from baton.rpc import RpcServer
from baton.sampling import FinishReason
from baton.telemetry.instruments import Instruments
from baton.v1 import worker_pb2_grpc
from kvstore.index import Mirror
from router.admission import Claim
from router.placement.pool_view import HintTracker, PoolView
from router.serve.choice import Choice, ChoiceGroup
from router.serve.driver import ChoiceDriver
from router.serve.waking import Waker
from router.serve.worker_client import WorkerClient
from tests.support import builders
from tests.support.builders import READY
from worker.calls import CallServicer

BLOCK = 16
NUM_PROMPT = 400
SPEC = builders.sequence_spec(range(NUM_PROMPT), max_tokens=8)
CLAIM = builders.claim(arrived_s=0.0)

Request = PrefillRequest | DecodeRequest | FetchRequest
Word = Event | BatonError | asyncio.Event | Callable[[SequenceSpec], Event | None]
"""What is sent, or raised, or waited for; or what makes something to be sent, or nothing, of the sequence."""
Script = Sequence[Word]


def new_choice(emitted: Sequence[int] = (), finish_reason: FinishReason | None = None) -> Choice:
    """A choice that has not been served here."""
    return Choice(spec=SPEC, claim=CLAIM, trace=Context(), emitted=list(emitted), finish_reason=finish_reason)


def ticket(spec: SequenceSpec) -> Ticket:
    layout = KvLayout(BLOCK, 1, ())
    return Ticket(
        transfer_id=spec.sequence_id,
        generation=1,
        decode_worker_id="d",
        incarnation="i",
        kv_address="h:1",
        num_tokens=len(spec.token_ids),
        skip_tokens=0,
        wire_compat="wire",
        layout=layout,
    )


class ScriptedWorkers:
    """Any number of workers behind one address. The first call of a kind follows the first of its scripts, the second
    the second; at the end of its script a call is silent until the router leaves it.
    """

    def __init__(
        self, *, decode: Sequence[Script] = (), prefill: Sequence[Script] = (), fetch: Sequence[Script] = ()
    ) -> None:
        self.requests: list[Request] = []
        """All that came, in order."""
        self._decode, self._prefill, self._fetch = iter(decode), iter(prefill), iter(fetch)
        self.servicer = CallServicer(
            decode=lambda request, _: self._follow(next(self._decode), request),
            prefill=lambda request, _: self._follow(next(self._prefill), request),
            fetch=lambda request, _: self._follow(next(self._fetch), request),
        )

    @property
    def kinds(self) -> list[type[Request]]:
        return [type(request) for request in self.requests]

    async def _follow(self, script: Script, request: Request) -> AsyncGenerator[Event]:
        self.requests.append(request)
        for word in script:
            match word:
                case BatonError():
                    raise word
                case asyncio.Event():
                    await word.wait()
                case _:
                    said = word(request.sequence) if callable(word) else word
                    if said is not None:
                        yield said
        await asyncio.Event().wait()


class Clock:
    """Of the router; a test may put it forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Bench:
    """A driver, and what it sees of its workers."""

    def __init__(
        self,
        address: str,
        held: Mapping[str, int],
        config: RouterConfig,
        client: WorkerClient,
    ) -> None:
        self.address = address
        self.clock = Clock()
        self.pools = PoolView(lambda keys: dict(held), self.clock.monotonic)
        self.instruments = Instruments(builders.cluster_status)
        hints = HintTracker(Mirror(), self.instruments)
        self.num_wakes = 0
        """How often the model was to be woken."""
        self.waker = Waker(self.pools, self._wake, config, self.clock.monotonic)
        self.driver = ChoiceDriver(
            pools=self.pools,
            client=client,
            hints=hints,
            config=config,
            instruments=self.instruments,
            waker=self.waker,
        )
        self._leases: dict[str, Worker] = {}

    async def _wake(self) -> None:
        self.num_wakes += 1

    async def lease(self, worker_id: str, role: Role, load: WorkerLoad = READY, **more: Any) -> None:
        """A worker comes, or says something else of itself.

        Args:
            more: of `WorkerInfo`.
        """
        info: dict[str, Any] = {"address": self.address, "block_size": BLOCK, "known_fields": wire.KNOWN_FIELDS} | more
        self._leases[worker_id] = builders.worker(worker_id, role, load, **info)
        await self.pools.update(self._leases.values())

    async def tokens(
        self, choice: Choice | None = None, *, spec: SequenceSpec = SPEC, claim: Claim = CLAIM
    ) -> AsyncGenerator[int]:
        """The tokens of one choice, as they come."""
        choice = choice or new_choice()
        choice.spec, choice.claim = spec, claim
        async with contextlib.aclosing(self.driver.run(ChoiceGroup(choices=(choice,)))) as messages:
            async for _, message in messages:
                for token_id in message.token_ids:
                    yield token_id


@contextlib.asynccontextmanager
async def bench_of(
    workers: ScriptedWorkers,
    roles: Mapping[str, Role],
    mode: str,
    held: Mapping[str, int] | None = None,
    *,
    max_attempts: int = 4,
    wake_wait_s: float = 300.0,
) -> AsyncIterator[Bench]:
    """A bench of these workers, for 20 s at most.

    Args:
        roles: by the worker's id.
        held: leading blocks of any prompt that a worker is believed to hold.
        max_attempts: consecutive failures after which a choice is given up.
        wake_wait_s: how long a choice waits for a model that sleeps.
    """
    rpc = RpcServer(("baton.v1.WorkerCalls",))
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(workers.servicer, rpc.server)
    address = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    calls = WorkerClient()
    config = RouterConfig(mode=mode, worker_wait_s=1, max_attempts=max_attempts, wake_wait_s=wake_wait_s)
    bench = Bench(address, held or {}, config, calls)
    try:
        async with asyncio.timeout(20):
            for worker_id, role in roles.items():
                await bench.lease(worker_id, role)
            yield bench
    finally:
        await calls.close()
        await rpc.stop(0)
