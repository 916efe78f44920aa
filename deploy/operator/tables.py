"""Tables of `baton status`, which fit into 80 columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from baton.cluster import Computes, ModelState, Role, with_role
from deploy.terminal import Terminal


def print_status(report: dict[str, Any]) -> None:
    """Print the report of `Client.status`."""
    out = Terminal(soft_wrap=True)
    models = report["models"]
    if len(models) > 1 or any(_state(model) != ModelState.READY or model.get("wake_s") for model in models):
        out.print(model_table(models))
        for line in problem_lines(models):
            out.print(line)
    workers = in_order(report["workers"])
    out.print(worker_table(workers))
    workers = with_releases(workers)
    out.print(transfer_table(workers))
    for lines in (state_lines, adapter_lines, engine_lines, computing_lines, connection_lines):
        for line in lines(workers):
            out.print(line)
    for line in pool_lines(report["pools"]):
        out.print(line)
    for router in report["routers"]:
        out.print(f"router {router['id']}: pid {router['pid']}, grpc {router['grpc']}, http {router['http']}")
    for line in controller_lines(report):
        out.print(line)
    redis = report["redis"]
    out.print(f"redis {redis['address']}: {'ok' if redis['ok'] else 'not reachable'}")
    for line in garbage_lines(redis):
        out.print(line)


def model_table(models: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per model.

    Args:
        models: as in `baton status --json`.
    """
    table = new_table("model", "release", "share", "state", "prefill", "decode", "held")
    shares: Counter[str] = Counter()
    for model in models:
        shares[model["id"]] += model["share"]
    for model in sorted(models, key=lambda each: (each["id"], each["release"])):
        alone = sum(each["id"] == model["id"] for each in models) == 1
        share = "" if alone else f"{model['share'] / shares[model['id']]:.0%}" if shares[model["id"]] else "0%"
        state = _state(model) + (f", woke in {model['wake_s']:.0f} s last time" if model.get("wake_s") else "")
        pools = (model.get("pools", {}).get(pool.value) for pool in Role)
        sizes = (f"{pool['ready']} of {pool['desired']}" if pool else "-" for pool in pools)
        table.add_row(model["id"], model["release"], share, state, *sizes, str(model.get("held", 0)))
    return table


def problem_lines(models: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line for each model that wakes without progress, with the reason."""
    return [f"{model['release']} does not wake: {model['problem']}" for model in models if model.get("problem")]


def model_in_words(model: Mapping[str, Any]) -> str:
    """Return a model's name, and its state unless it is ready."""
    state = _state(model)
    return str(model["id"]) if state == ModelState.READY else f"{model['id']} ({state})"


def _state(model: Mapping[str, Any]) -> str:
    """Return the state of a model; a router of an older release reports none."""
    return model.get("state") or ModelState.READY.value


def has_several_releases(workers: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if the workers are of several releases: then the same id may occur more than once."""
    return len({worker.get("release", "") for worker in workers}) > 1


def with_releases(workers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the workers, with the release before each id if the workers are of several releases."""
    if not has_several_releases(workers):
        return [*workers]
    return [{**worker, "id": f"{worker['release']}/{worker['id']}"} for worker in workers]


def controller_lines(report: Mapping[str, Any]) -> list[str]:
    """Return one line with the controller, or one for each model's if there are several models."""
    return [
        f"{name}: pid {found['pid']}, {found['address']}" if found else f"{name}: none known"
        for name, found in controllers_of(report).items()
    ]


def controllers_of(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """Return the controller of each model, by its name for people; None: it is not known."""
    models = report["models"]
    if len(models) < 2:
        return {"controller": report.get("controller")}
    return {f"controller of {model['release']}": model.get("controller") for model in models}


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
    """Return the workers in display order: by release, the prefill pool first, and each pool by worker number."""

    def place(worker: Mapping[str, Any]) -> tuple[Any, ...]:
        return worker.get("release", ""), worker["role"] != Role.PREFILL, natural_key(worker["id"])

    return sorted(workers, key=place)


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

    If the workers are of several releases, the first column is the release.

    Args:
        workers: as in `baton status --json`.
    """
    releases = (
        [(str(worker["release"]),) for worker in workers] if has_several_releases(workers) else [()] * len(workers)
    )
    table = new_table(
        *(["release"] if any(releases) else []),
        "worker",
        "role",
        "state",
        "pid",
        "address",
        "run/wait",
        "free/cached/use",
    )
    for release, worker in zip(releases, workers, strict=True):
        blocks = worker["blocks"]
        state = worker["state"] if worker["self_check"] == "ok" else f"{worker['state']}: {worker['self_check']}"
        table.add_row(
            *release,
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
