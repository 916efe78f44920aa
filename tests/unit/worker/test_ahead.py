"""Which workers a prefill worker connects to ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.cluster import Role, Worker, WorkerLoad, WorkerState
from kvstore.transfer.connection.control_stream import Peer
from tests.support.builders import worker, worker_info
from worker.ahead import peers_of

OWN = worker_info("prefill-0", Role.PREFILL, incarnation="own")


def decode(name: str, **values: Any) -> Worker:
    return worker(name, **{"incarnation": f"{name}.1", "address": f"{name}:1", **values})


def test_only_decode_workers_that_are_ready_and_fit_are_peers() -> None:
    ready = decode("good")
    others = [
        dataclasses.replace(decode("new"), load=WorkerLoad(state=WorkerState.STARTING)),
        dataclasses.replace(decode("leaving"), load=WorkerLoad(state=WorkerState.DRAINING)),
        decode("stranger", wire_compat="other"),
        decode("old", incarnation=""),
        worker("prefill-1", Role.PREFILL, incarnation="p1"),
        decode("prefill-0"),
    ]
    assert peers_of(OWN, [*others, ready]) == [Peer("good", "good.1", "good:1", 0)]


def test_each_worker_has_an_order_of_its_own_that_stays() -> None:
    workers = [decode(f"d{number}") for number in range(8)]
    orders = [[peer.worker_id for peer in peers_of(dataclasses.replace(OWN, id=f"p{n}"), workers)] for n in range(4)]
    assert orders[0] == [peer.worker_id for peer in peers_of(dataclasses.replace(OWN, id="p0"), workers[::-1])]
    assert len({tuple(order) for order in orders}) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(f"d{number}" for number in range(8))}
