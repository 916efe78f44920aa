"""The tables of `baton status`: the cluster, and how a request was placed. They fit 80 columns."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.api import Explanation, Option
from baton.cluster import Role
from baton.errors import InvalidRequest


def print_status(report: dict[str, Any]) -> None:
    """Prints the report of `Client.status`."""
    out = Console(soft_wrap=True)
    out.print(worker_table(report["workers"]))
    out.print(transfer_table(report["workers"]))
    for line in (*moved_lines(report["workers"]), *engine_lines(report["workers"])):
        out.print(line, markup=False)
    for name, pool in report["pools"].items():
        out.print(f"pool {name}: {pool['ready']} ready of {pool['desired']} desired")
    for router in report["routers"]:
        out.print(f"router {router['id']}: pid {router['pid']}, grpc {router['grpc']}, http {router['http']}")
    controller = report.get("controller")
    out.print(
        f"controller: pid {controller['pid']}, {controller['address']}" if controller else "controller: none known"
    )
    redis = report["redis"]
    out.print(f"redis {redis['address']}: {'ok' if redis['ok'] else 'not reachable'}")
    for line in garbage_lines(redis):
        out.print(line, markup=False)


def garbage_lines(redis: dict[str, Any]) -> list[str]:
    """Values in Redis that the router could not read: one line per kind."""
    return [f"  {each['what']} skipped {each['times']} times: {each['latest']}" for each in redis["garbage"]]


def moved_lines(workers: list[dict[str, Any]]) -> list[str]:
    """The workers whose role is not the one that their names have: one line each."""
    return [
        f"{worker['id']} began as a {began} worker, and keeps its name"
        for worker in workers
        if (began := worker["id"].rpartition("-")[0]) in list(Role) and began != worker["role"]
    ]


def engine_lines(workers: list[dict[str, Any]]) -> list[str]:
    """The engines and samplers that compute: one line for each pair, with its workers."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        pairs.setdefault((worker["engine"], worker["sampler"]), []).append(worker["id"])
    return [
        f"engine {engine or 'unknown'}, sampler {sampler or 'unknown'}: {', '.join(ids)}"
        for (engine, sampler), ids in sorted(pairs.items())
    ]


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """One row per worker, with its KV blocks. A failed self-check is shown with the state.

    Args:
        workers: as in `baton status --json`.
    """
    table = _table("worker", "role", "state", "pid", "address", "run/wait", "free/cached/use")
    for worker in workers:
        blocks = worker["blocks"]
        state = worker["state"] if worker["self_check"] == "ok" else f"{worker['state']}: {worker['self_check']}"
        table.add_row(
            *(str(value) for value in (worker["id"], worker["role"], state, worker["pid"], worker["address"])),
            f"{worker['running']}/{worker['waiting']}",
            f"{blocks['free']}/{blocks['cached']}/{blocks['in_use']}",
        )
    return table


def transfer_table(workers: list[dict[str, Any]]) -> Table:
    """One row per worker, with its KV transfers."""
    table = _table("KV transfers", "committed", "failed", "pulled tokens", "unsent MiB", "pairs", "slots")
    for worker in workers:
        kv = worker["transfers"]
        table.add_row(
            worker["id"],
            *(str(kv[name]) for name in ("committed", "failed", "pulled_tokens")),
            f"{kv['unsent_bytes'] / 2**20:.1f}",
            *(str(kv[name]) for name in ("open_pairs", "slots_in_use")),
        )
    return table


def print_explanations(explanations: list[Explanation], request_id: str, as_json: bool) -> None:
    """Prints how each choice of the request was placed. Raises InvalidRequest if there is no explanation."""
    if not explanations:
        raise InvalidRequest(f"the router does not know a request {request_id!r}; it keeps the latest few hundred")
    if as_json:
        print(json.dumps([_finite(dataclasses.asdict(each)) for each in explanations], indent=2))  # noqa: T201
        return
    out = Console(soft_wrap=True)
    for each in explanations:
        workers = " -> ".join(name for name in (each.prefill_worker, each.decode_worker) if name)
        pulled = f", pulls {each.source_tokens} tokens from {each.source}" if each.source else ""
        measured = f"{each.measured_ttft_s:.3f} s" if each.measured_ttft_s else "not yet"
        out.print(f"{each.request_id}/{each.choice_index}: {each.mode} on {workers}{pulled}; {each.outcome}")
        out.print(
            f"tenant {each.tenant}, class {each.slo_class}, priority {each.priority}; objectives: first token "
            f"{each.ttft_objective_s:g} s, between tokens {each.itl_objective_s:g} s"
        )
        out.print(f"{each.num_prompt_tokens} prompt tokens, room for {each.num_expected_tokens} tokens of answer")
        out.print(f"first token: predicted {each.predicted_ttft_s:.3f} s, measured {measured}")
        out.print(option_table(each.options))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values for JSON, which has no infinity: null is an objective that cannot be missed."""
    return {name: None if value == math.inf else value for name, value in values.items()}


def option_table(options: Sequence[Option]) -> Table:
    """The workers that could have been chosen, the fastest to a first token first."""
    table = _table("worker (ms)", "cached", "wait", "pull", "compute", "cost", "room", "exposed", "step")
    for option in options:
        seconds = (option.wait_s, option.pull_s, option.compute_s, option.cost_s)
        decoding = (option.room_s, option.exposed_s, option.step_s)
        table.add_row(
            option.worker_id,
            str(option.num_cached_tokens),
            *(f"{value * 1e3:.1f}" for value in seconds),
            *(f"{value * 1e3:.1f}" if option.role == Role.DECODE else "" for value in decoding),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
