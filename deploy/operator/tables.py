"""Tables of `baton status`, which fit into 80 columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from baton.cluster import Computes, Role, with_role
from deploy.terminal import Terminal


def print_status(report: dict[str, Any]) -> None:
    """Print the report of `Client.status`."""
    out = Terminal(soft_wrap=True)
    workers = in_order(report["workers"])
    out.print(worker_table(workers))
    out.print(transfer_table(workers))
    for lines in (state_lines, adapter_lines, engine_lines, computing_lines, connection_lines):
        for line in lines(workers):
            out.print(line)
    for line in pool_lines(report["pools"]):
        out.print(line)
    for router in report["routers"]:
        out.print(f"router {router['id']}: pid {router['pid']}, grpc {router['grpc']}, http {router['http']}")
    controller = report.get("controller")
    out.print(
        f"controller: pid {controller['pid']}, {controller['address']}" if controller else "controller: none known"
    )
    redis = report["redis"]
    out.print(f"redis {redis['address']}: {'ok' if redis['ok'] else 'not reachable'}")
    for line in garbage_lines(redis):
        out.print(line)


def pool_lines(pools: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line per pool: its size and, if the pools' engines differ, the settings that do."""
    lines = []
    for name, pool in pools.items():
        own = pool.get("engine")  # missing in the status of an older release
        lines.append(f"pool {name}: {pool['ready']} ready of {pool['desired']} desired{'; ' if own else ''}")
        lines[-1] += ", ".join(own or ())
    return lines


def garbage_lines(redis: dict[str, Any]) -> list[str]:
    """Return one line per kind of values in Redis that the router could not read."""
    return [f"  {each['what']} skipped {each['times']} times: {each['latest']}" for each in redis["garbage"]]


def in_order(workers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the workers in display order: the prefill pool first, and each pool ordered by worker number."""
    return sorted(workers, key=lambda worker: (worker["role"] != Role.PREFILL, natural_key(worker["id"])))


def natural_key(text: str) -> list[tuple[int, str]]:
    """Return a sort key by which worker-2 comes before worker-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def state_lines(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line with each worker's rows of states; none if no model has any."""
    counts = ((with_role(each["id"], each["role"]), each.get("state_rows")) for each in workers)
    shown = [f"{name} {rows['free']}/{rows['cached']}/{rows['in_use']}" for name, rows in counts if rows]
    return [f"state rows, free/snapshots/in use: {', '.join(shown)}"] if shown else []


def adapter_lines(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line per worker with LoRA adapters in memory: how many fit, and their names."""
    lines = []
    for each in workers:
        if names := each.get("adapters"):  # missing in the status of an older release
            label = with_role(each["id"], each["role"])
            lines.append(f"adapters on {label}, {len(names)} of {each['max_adapters']}: {', '.join(sorted(names))}")
    return lines


def engine_lines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each combination of engine and sampler, with its workers."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        pairs.setdefault((worker["engine"], worker["sampler"]), []).append(with_role(worker["id"], worker["role"]))
    return [
        f"engine {engine or 'unknown'}, sampler {sampler or 'unknown'}: {', '.join(ids)}"
        for (engine, sampler), ids in sorted(pairs.items())
    ]


def computes_of(worker: Mapping[str, Any]) -> Computes:
    """Return the hardware and the software with which a worker of `baton status --json` computes."""
    values = worker.get("computes")  # missing in the status of an older release
    return Computes(**values | {"fallbacks": tuple(values["fallbacks"])}) if values else Computes()


def computing_lines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each group of workers that compute alike, and one for each of its slower fallbacks."""
    alike: dict[Computes, list[str]] = {}
    for worker in workers:
        alike.setdefault(computes_of(worker), []).append(with_role(worker["id"], worker["role"]))
    lines = []
    for computes, ids in sorted(alike.items(), key=lambda item: item[1]):
        lines.append(f"computes on {computes.in_words()}: {', '.join(ids)}")
        lines += [f"  slower than it could be: {each}" for each in computes.fallbacks]
    return lines


def connection_lines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line with the open connections of all workers by kind, counted on both sides."""
    ends: Counter[str] = Counter()
    for worker in workers:
        for each in worker["connections"]:
            kind = f"{each['transport']} by {each['carrier']}" if each["carrier"] else each["transport"]
            ends[kind] += each["open_connections"]
    return (
        [f"connections, by ends: {', '.join(f'{number} {kind}' for kind, number in sorted(ends.items()))}"]
        if ends
        else []
    )


def worker_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per worker and its KV blocks. A failed self-check is shown with the state.

    Args:
        workers: as in `baton status --json`.
    """
    table = new_table("worker", "role", "state", "pid", "address", "run/wait", "free/cached/use")
    for worker in workers:
        blocks = worker["blocks"]
        state = worker["state"] if worker["self_check"] == "ok" else f"{worker['state']}: {worker['self_check']}"
        table.add_row(
            *(str(value) for value in (worker["id"], worker["role"], state, worker["pid"], worker["address"])),
            f"{worker['running']}/{worker['waiting']}",
            f"{blocks['free']}/{blocks['cached']}/{blocks['in_use']}",
        )
    return table


def transfer_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per worker and its KV transfers."""
    table = new_table("KV transfers", "committed", "failed", "pulled tokens", "unsent MiB", "open", "slots")
    for worker in workers:
        kv = worker["transfers"]
        table.add_row(
            with_role(worker["id"], worker["role"]),
            *(str(kv[name]) for name in ("committed", "failed", "pulled_tokens")),
            f"{kv['unsent_bytes'] / 2**20:.1f}",
            *(str(kv[name]) for name in ("open_connections", "slots_in_use")),
        )
    return table


def new_table(*headings: str) -> Table:
    """Return a table without lines; long words are folded."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
