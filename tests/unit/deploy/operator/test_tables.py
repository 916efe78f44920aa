"""What `baton status` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from baton.cluster import Computes
from deploy.operator.tables import (
    computing_lines,
    connection_lines,
    controller_lines,
    engine_lines,
    garbage_lines,
    in_order,
    model_in_words,
    model_table,
    pool_lines,
    print_status,
    problem_lines,
    state_lines,
    transfer_table,
    with_releases,
    worker_table,
)

WORKER = {
    "id": "worker-0",
    "role": "decode",
    "state": "draining",
    "pid": 123456,
    "address": "127.0.0.1:50052",
    "running": 64,
    "waiting": 12,
    "self_check": "ok",
    "blocks": {"total": 5000, "free": 4000, "cached": 950, "in_use": 50},
    "transfers": {
        "open_connections": 4,
        "slots_in_use": 3,
        "unsent_bytes": 3 * 2**19,
        "committed": 12,
        "failed": 6,
        "pulled_tokens": 320,
    },
}


def printed(table: Table) -> tuple[str, str]:
    """The heading and the row, in a terminal of 80 columns."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    heading, row = captured.get().splitlines()
    return heading, row


def test_a_pool_s_own_settings_are_shown_beside_its_size() -> None:
    own = ["kv_dtype=bfloat16", "tensor_parallel=2"]
    pools: dict[str, dict[str, Any]] = {
        "decode": {"ready": 1, "desired": 2, "engine": own},
        "prefill": {"ready": 1, "desired": 1, "engine": []},
        "old": {"ready": 0, "desired": 1},
    }
    assert pool_lines(pools) == [
        "pool decode: 1 ready of 2 desired; kv_dtype=bfloat16, tensor_parallel=2",
        "pool prefill: 1 ready of 1 desired",
        "pool old: 0 ready of 1 desired",
    ]


def test_prefill_workers_are_shown_first_and_each_pool_s_by_their_numbers() -> None:
    roles = {"worker-10": "decode", "worker-2": "decode", "worker-11": "prefill", "w": "prefill", "worker-9": "prefill"}
    shown = in_order([WORKER | {"id": name, "role": role} for name, role in roles.items()])
    assert [worker["id"] for worker in shown] == ["w", "worker-9", "worker-11", "worker-2", "worker-10"]


def test_the_status_table_fits_a_terminal_whole() -> None:
    heading, row = printed(worker_table([WORKER]))
    assert row.split() == [
        "worker-0",
        "decode",
        "draining",
        "123456",
        "127.0.0.1:50052",
        "64/12",
        "4000/950/50",
    ]
    assert heading.split()[0] == "worker"


def test_the_status_shows_what_is_wrong_with_a_worker() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(worker_table([WORKER | {"self_check": "3 blocks are lost"}]))
    assert "draining: 3 blocks are lost" in captured.get()


def test_the_status_shows_what_is_skipped_in_redis() -> None:
    garbage = [{"what": "lease", "times": 3, "latest": "kv:{x}:lease:w: [1] is no object"}]
    assert garbage_lines({"garbage": garbage}) == ["  lease skipped 3 times: kv:{x}:lease:w: [1] is no object"]


def test_the_status_counts_rows_of_states_if_there_are_any() -> None:
    rows = {"total": 40, "free": 30, "cached": 8, "in_use": 2}
    workers = [WORKER | {"state_rows": rows}, WORKER, WORKER | {"id": "w", "role": "prefill", "state_rows": rows}]
    shown = "state rows, free/snapshots/in use: worker-0 (decode) 30/8/2, w (prefill) 30/8/2"
    assert state_lines(workers) == [shown]
    assert state_lines([WORKER]) == []


def test_the_status_shows_a_workers_transfers() -> None:
    heading, row = printed(transfer_table([WORKER]))
    wanted = {
        "committed": "12",
        "failed": "6",
        "pulled tokens": "320",
        "unsent MiB": "1.5",
        "open": "4",
        "slots": "3",
    }
    assert row.startswith("worker-0 (decode) ")
    for name, value in wanted.items():
        assert row[heading.index(name) :].split()[0] == value, name


def test_what_workers_compute_with_is_listed_and_what_is_slow() -> None:
    types = {"dtype": "bfloat16", "weights": "fp8", "kv_dtype": "bfloat16"}
    ways = {"attention": "kernels", "num_graphs": 35, "num_fused": 129, "plans_ahead": True, "kv_copies": "kernels"}
    fast = asdict(Computes()) | {"gpu": "NVIDIA H200", "num_ranks": 2, **types, **ways}
    slow = fast | {"attention": "torch", "num_graphs": 0, "fallbacks": ["attention is by torch: no [bold]compiler"]}
    own = asdict(Computes(dtype="float32", weights="int8g", kv_dtype="int8", attention="native"))
    kinds = {"d0": fast, "d1": slow, "d2": fast, "d3": own, "d4": None}
    workers = [WORKER | {"id": name, **({"computes": kind} if kind else {})} for name, kind in kinds.items()]
    assert computing_lines(workers) == [
        "computes on 2 x NVIDIA H200, bfloat16, weights fp8, attention kernels, 35 CUDA graphs, 129 fused parts, "
        "planned ahead, KV copied by kernels: d0 (decode), d2 (decode)",
        "computes on 2 x NVIDIA H200, bfloat16, weights fp8, attention torch, no CUDA graphs, 129 fused parts, planned "
        "ahead, KV copied by kernels: d1 (decode)",
        "  slower than it could be: attention is by torch: no [bold]compiler",
        "computes on CPU, float32, weights int8g, KV int8, attention native: d3 (decode)",
        "computes on unknown: d4 (decode)",
    ]


def test_connections_are_counted_by_kind() -> None:
    nccl, tcp = (
        {"transport": "nccl", "carrier": "NET/IB", "open_connections": 2},
        {"transport": "tcp", "carrier": "", "open_connections": 1},
    )
    workers = [WORKER | {"connections": each} for each in ([nccl, tcp], [nccl], [])]
    assert connection_lines(workers) == ["connections, by ends: 4 nccl by NET/IB, 1 tcp"]
    assert connection_lines(workers[2:]) == []


def test_workers_are_listed_by_engine_and_sampler() -> None:
    makes = {"d0": ("transformers", "s/1"), "d1": ("", ""), "d2": ("transformers", "s/1"), "d3": ("arithmetic", "s/1")}
    workers = [WORKER | {"id": name, "engine": engine, "sampler": sampler} for name, (engine, sampler) in makes.items()]
    assert engine_lines(workers) == [
        "engine unknown, sampler unknown: d1 (decode)",
        "engine arithmetic, sampler s/1: d3 (decode)",
        "engine transformers, sampler s/1: d0 (decode), d2 (decode)",
    ]


BIG = {"id": "big", "release": "big-1", "share": 1.0, "state": "ready"}
POOL = {"ready": 1, "desired": 2}


def rows(table: Table) -> list[list[str]]:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    return [line.split() for line in captured.get().splitlines()]


def test_each_model_has_a_row_with_its_state_and_its_share_of_a_name() -> None:
    models: list[dict[str, Any]] = [
        {**BIG, "release": "big-2", "share": 3.0, "pools": {"prefill": POOL, "decode": POOL}},
        BIG,
        {"id": "small", "release": "s", "share": 1.0, "state": "asleep", "held": 7, "wake_s": 41.2},
        {**BIG, "id": "off", "release": "off-1", "share": 0.0},
        {**BIG, "id": "off", "release": "off-2", "share": 0.0},
    ]
    assert rows(model_table(models))[1:] == [
        ["big", "big-1", "25%", "ready", "-", "-", "0"],
        ["big", "big-2", "75%", "ready", "1", "of", "2", "1", "of", "2", "0"],
        ["off", "off-1", "0%", "ready", "-", "-", "0"],
        ["off", "off-2", "0%", "ready", "-", "-", "0"],
        ["small", "s", "asleep,", "woke", "in", "41", "s", "last", "time", "-", "-", "7"],
    ]
    assert [model_in_words(each) for each in models[1:3]] == ["big", "small (asleep)"]
    assert model_in_words({"id": "of an older release"}) == "of an older release"


def test_the_status_gives_the_reason_why_a_model_does_not_wake() -> None:
    assert problem_lines([BIG, BIG | {"problem": "no node has room"}]) == ["big-1 does not wake: no node has room"]


def test_a_model_alone_has_a_row_only_if_it_tells_something(capsys: pytest.CaptureFixture[str]) -> None:
    """The row appears if the model sleeps, or if the time of its last wake-up is known."""
    nothing: dict[str, Any] = {
        "workers": [],
        "pools": {},
        "routers": [],
        "redis": {"address": "r:1", "ok": True, "garbage": []},
    }
    shown = []
    for changes in ({}, {"state": "asleep"}, {"wake_s": 41.2}):
        print_status({**nothing, "models": [BIG | changes]})
        shown.append(capsys.readouterr().out)
    assert ["big-1" in text for text in shown] == [False, True, True]
    assert "woke in 41 s" in shown[2]


def test_workers_of_several_models_are_told_apart() -> None:
    """Each model has a worker-0. With one model nothing changes."""
    workers = [WORKER | {"release": "b", "role": "prefill"}, WORKER | {"release": "a"}]
    shown = in_order(workers)
    table = rows(worker_table(shown))
    assert table[0][:2] == ["release", "worker"]
    assert [row[:3] for row in table[1:]] == [["a", "worker-0", "decode"], ["b", "worker-0", "prefill"]]
    assert [each["id"] for each in with_releases(shown)] == ["a/worker-0", "b/worker-0"]
    assert with_releases(workers[:1]) == workers[:1]
    assert rows(worker_table(workers[:1]))[0][0] == "worker"


def test_each_model_s_controller_has_a_line() -> None:
    known = {"pid": 7, "address": "h:1"}
    assert controller_lines({"models": [BIG], "controller": known}) == ["controller: pid 7, h:1"]
    assert controller_lines({"models": [BIG]}) == ["controller: none known"]
    several = [{**BIG, "controller": known}, {**BIG, "release": "big-2"}]
    assert controller_lines({"models": several}) == [
        "controller of big-1: pid 7, h:1",
        "controller of big-2: none known",
    ]
