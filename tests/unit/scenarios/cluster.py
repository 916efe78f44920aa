"""A cluster in one process, without Redis: drivers, workers with the arithmetic engine, real gRPC and links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from baton.cluster import Role
from baton.config import RouterConfig
from baton.messages import SequenceSpec
from baton.v1 import worker_pb2_grpc
from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService
from router.serve.choice import Choice
from router.serve.worker_client import WorkerClient
from tests.unit.kvstore.transfer.peers import Worker
from tests.unit.router.serve.scripted_workers import Bench, new_choice
from worker.calls import CallServicer

LIMIT_S = 60.0
"""Longest time that one wait of a test may take before the test counts as hanging."""


@dataclass(frozen=True)
class Answer:
    """What a client has got, and how."""

    token_ids: list[int]
    choice: Choice


def serve_calls(worker: Worker) -> None:
    """Lets routers reach the worker at its one address."""
    prefill, decode = PrefillService(worker.context), DecodeService(worker.context)
    servicer = CallServicer(prefill=prefill.prefill, decode=decode.decode, fetch=decode.fetch)
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(servicer, worker.server)


@contextlib.asynccontextmanager
async def router_of(
    workers: Sequence[tuple[Role, Worker]], mode: str, held: Mapping[str, int] | None = None
) -> AsyncIterator[Bench]:
    """A router that knows of these workers.

    Args:
        held: leading blocks of any prompt that a worker is believed to hold.
    """
    client = WorkerClient()
    bench = Bench("", held or {}, RouterConfig(mode=mode, worker_wait_s=30), client)
    for role, worker in workers:
        serve_calls(worker)
        await bench.lease(worker.id, role, address=worker.address)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield bench
    finally:
        await client.close()


async def ask(router: Bench, spec: SequenceSpec, choice: Choice | None = None) -> Answer:
    """Asks for one choice, to its end."""
    choice = choice or new_choice()
    return Answer([token async for token in router.tokens(choice, spec=spec)], choice)
