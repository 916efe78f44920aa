"""The `baton` command."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from baton import config as baton_config
from baton.api import Chat, ChatMessage, Explanation, GenerateRequest, Option, Prompt, Text
from baton.cluster import Role
from baton.config import Config
from baton.errors import BatonError, ConfigError, Conflict, InvalidRequest
from baton.telemetry import logs
from deploy.local.part import Part
from deploy.operator.client import Client

app = typer.Typer(
    help="Baton: disaggregated serving of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True, soft_wrap=True, highlight=False)

Address = Annotated[str, typer.Option(help="Router, host:port.", envvar="BATON_ADDRESS")]
ApiKey = Annotated[
    str, typer.Option(help="The tenant's, where the cluster has tenants.", envvar="BATON_API_KEY", show_default=False)
]
TimeoutS = Annotated[float, typer.Option("--timeout", help="Longest wait, in seconds; the order stands.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]

# Of `bench` and `simulate`: with the same ones both have the same requests.
TracePath = Annotated[
    Path | None, typer.Argument(help="Mooncake .jsonl or Azure .csv, also .gz; a generated conversation without it.")
]
Speed = Annotated[float, typer.Option(help="Rate of arrivals, times the trace's own.")]
Requests = Annotated[int, typer.Option(help="The first so many; 0: all.")]
FromS = Annotated[float, typer.Option("--from", help="Second of the trace at which to begin.")]
Seconds = Annotated[float, typer.Option(help="Of the trace to replay, before --speed; 0: to its end.")]
Scale = Annotated[int, typer.Option(help="Divide the lengths of prompts and outputs by this.")]
Block = Annotated[
    int | None, typer.Option(help="Tokens that a block of the trace has after --scale.", show_default="16")
]
MaxOutput = Annotated[int, typer.Option(help="Longest output, in tokens; 0: as the trace says.")]
TtftMs = Annotated[float, typer.Option(help="Objective: time to first token.")]
ItlMs = Annotated[float, typer.Option(help="Objective: mean time between tokens of a request.")]


@app.command()
def up(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.", show_default="1")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.", show_default="1")] = None,
    model: Annotated[
        str | None, typer.Option(help="A hub id, a local folder, or smollm2-135m-instruct (the default).")
    ] = None,
    routers: Annotated[
        int | None, typer.Option(min=1, help="Router processes behind one address.", show_default="1")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a Ray cluster to run the workers in, instead of one of our own.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    ask: Annotated[str | None, typer.Option(help="A prompt to answer once the cluster is ready.")] = None,
    api_key: ApiKey = "",
) -> None:
    """Serve a model on this machine: Redis, Ray, both pools and the routers. Ctrl-C ends all of it.

    Prints `BATON READY grpc=HOST:PORT http=HOST:PORT` when it takes requests. Ports: BATON_GRPC_PORT, BATON_HTTP_PORT.
    """
    from deploy.local.up import up as run_up

    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level, settings.telemetry.log_format)
    cluster = settings.cluster
    cluster = dataclasses.replace(
        cluster,
        prefill=cluster.prefill if prefill is None else prefill,
        decode=cluster.decode if decode is None else decode,
        routers=cluster.routers if routers is None else routers,
        ray_address=cluster.ray_address if ray_address is None else ray_address,
    )
    settings = dataclasses.replace(settings, cluster=cluster)
    if model is not None:
        settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, id=model))
    asyncio.run(run_up(settings, console, lambda ready: _on_ready(ready, ask, api_key)))


@app.command()
def run(
    part: Annotated[Part, typer.Argument(help="model: get it into the cache, and end. router, controller: serve.")],
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
) -> None:
    """Run one part of a cluster in the foreground, as containers do. The parts find each other through Redis and Ray.

    Workers run on any Ray node with room: ray start --address=HEAD:6379 --resources='{"baton_worker": 1}'

    Those that begin in one pool alone, if the node says so: --labels baton.dev/pool=decode

    Ray puts them behind all other processes, unless the node has RAY_worker_niceness=0 in its environment.
    """
    from deploy.local.parts import run as run_part

    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level, settings.telemetry.log_format)
    run_part(part, settings, console)


@app.command()
def leave(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", help="Longest wait, in seconds.", show_default="for a drain and a start"),
    ] = None,
) -> None:
    """Have the workers of this machine leave the cluster, others take their place first. A pod's preStop.

    Ends with status 1 when some of them are still there at the end.
    """
    from deploy.local.leave import leave as leave_cluster
    from deploy.local.leave import own_hosts
    from deploy.local.parts import with_model

    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level, settings.telemetry.log_format)
    if timeout_s is None:
        timeout_s = settings.cluster.drain_timeout_s + settings.cluster.start_timeout_s
    left = asyncio.run(leave_cluster(with_model(settings, console), own_hosts(), timeout_s))
    if left:
        raise Conflict(f"still here after {timeout_s:g} s: {', '.join(left)}")


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the model's default if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the text as a user's message in a chat.")] = False,
    address: Address = baton_config.DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Stream an answer to a prompt."""
    prompt: Prompt = Chat((ChatMessage("user", text),)) if chat else Text(text)
    optional = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = {name: value for name, value in optional.items() if value is not None}
    _generate(GenerateRequest(prompt=prompt, sampling=sampling), Client(address, api_key), as_json)


@app.command(name="scale")
def scale_pool(
    pool: Annotated[str, typer.Argument(help="prefill or decode.")],
    num_workers: Annotated[int, typer.Argument(metavar="N", min=0, help="Workers that it should have.")],
    wait: Annotated[bool, typer.Option(help="Until the pool has them.")] = True,
    timeout_s: TimeoutS = 600.0,
    address: Address = baton_config.DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Set how many workers a pool should have. Those that leave hand over what they do."""
    from deploy.operator.orders import scale

    with contextlib.closing(Client(address, api_key)) as client:
        scale(client, console, pool, num_workers, timeout_s if wait else 0, as_json)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Its id, as `baton status` tells.")],
    timeout_s: TimeoutS = 600.0,
    address: Address = baton_config.DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Take a worker out: its work goes to others, another one takes its place. Waits until it is gone."""
    from deploy.operator.orders import drain

    with contextlib.closing(Client(address, api_key)) as client:
        drain(client, console, worker, timeout_s, as_json)


@app.command()
def role(
    worker: Annotated[str, typer.Argument(help="Its id, as `baton status` tells.")],
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    address: Address = baton_config.DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Move a worker to the other pool, with its cache; both pools' sizes follow."""
    from deploy.operator.orders import set_role

    with contextlib.closing(Client(address, api_key)) as client:
        set_role(client, console, worker, role, as_json)


@app.command()
def status(
    address: Address = baton_config.DEFAULT_ADDRESS,
    explain: Annotated[str, typer.Option(metavar="REQUEST", help="Why a request went where it went, by its id.")] = "",
    live: Annotated[bool, typer.Option("--watch", help="Goodput, latencies and workers, every second.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show pools, workers, routers, controller and Redis; or explain how a request was placed."""
    if live:
        from deploy.operator.watch import watch

        if explain or as_json:
            raise InvalidRequest("--watch shows a picture that changes; leave out --explain and --json")
        watch(address, Console())
        return
    client = Client(address)
    try:
        if explain:
            show_explanations(client.explain(explain), explain, as_json)
            return
        report = client.status()
    finally:
        client.close()
    if as_json:
        print(json.dumps(report, indent=2))  # noqa: T201
        return
    out = Console(soft_wrap=True)
    out.print(worker_table(report["workers"]))
    out.print(transfer_table(report["workers"]))
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
    """What the router could not read there, a line for each kind."""
    return [f"  {each['what']} skipped {each['times']} times: {each['latest']}" for each in redis["garbage"]]


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """One row a worker, of `baton status --json`, with its KV blocks; nothing is cut in a terminal of 80 columns.

    What its self-check finds is a part of its state.
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
    """The same workers' KV transfers."""
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


def show_explanations(explanations: list[Explanation], request_id: str, as_json: bool) -> None:
    """Raises InvalidRequest if there are none."""
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
    """JSON knows no infinity: null is an objective that nothing can miss."""
    return {name: None if value == math.inf else value for name, value in values.items()}


def option_table(options: Sequence[Option]) -> Table:
    """The workers that could have been chosen, the quickest to a first token first; 80 columns wide."""
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


@app.command()
def autoscale(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and why; the only way.")
    ] = False,
    address: Address = baton_config.DEFAULT_ADDRESS,
    seconds: Annotated[
        float | None, typer.Option(help="To measure.", show_default="autoscale.window_s", min=0.1)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Window after window, with its cool-downs.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a running cluster for a while, and tell how the autoscaler would size its pools.

    Objectives and bounds are those of the configuration: router.slo_classes (the
    strictest) and autoscale. With autoscale.enabled, the cluster's controller
    does it by itself.
    """
    from deploy.scaling.command import run

    if not dry_run:
        raise InvalidRequest(
            "the controller changes the pools: start the cluster with BATON_AUTOSCALE_ENABLED=true, or give --dry-run"
        )
    settings = baton_config.load(config)
    with contextlib.closing(Client(address)) as client:
        run(client, settings, seconds or settings.autoscale.window_s, watch, as_json)


@app.command()
def doctor(
    address: Annotated[
        str, typer.Option(help="Router, host:port; else the configured port.", envvar="BATON_ADDRESS")
    ] = "",
    part: Annotated[
        str, typer.Option(help="laptop, cluster; router, controller, worker: what that container needs to start.")
    ] = "laptop",
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    api_key: ApiKey = "",
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to look again while something fails.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Check what must agree, here and in the cluster if one runs, and say how to mend what is wrong.

    Changes nothing. Exit status 1: something failed.
    """
    from deploy.doctor import Place, diagnose, not_configured, show

    if part not in list(Place):
        raise InvalidRequest(f"--part must be one of {', '.join(Place)}; got {part!r}")
    end_s = time.monotonic() + wait_s
    while True:
        try:
            settings = baton_config.load(config)
        except ConfigError as error:
            checks = not_configured(error)
            break
        router = address or f"{settings.cluster.host}:{settings.cluster.grpc_port}"
        checks = diagnose(settings, router, Place(part), api_key)
        if all(check.state != "fail" for check in checks) or time.monotonic() >= end_s:
            break
        time.sleep(1)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))  # noqa: T201
    else:
        show(checks, Console())
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


@app.command()
def bench(
    trace: TracePath = None,
    address: Address = baton_config.DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    speed: Speed = 1.0,
    requests: Requests = 0,
    from_s: FromS = 0.0,
    seconds: Seconds = 0.0,
    scale: Scale = 1,
    block: Block = None,
    max_output: MaxOutput = 0,
    concurrency: Annotated[
        int, typer.Option(help="Requests in flight at most, others wait; 0: each is sent at its time.")
    ] = 0,
    vocab: Annotated[
        int | None,
        typer.Option(help="Prompts' token ids are below this; the model must know all.", show_default="32000"),
    ] = None,
    ttft_ms: TtftMs = 5000.0,
    itl_ms: ItlMs = 100.0,
    seed: Annotated[int, typer.Option(help="Of tokens; a new one makes prompts that no cache has yet.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Replay a trace against a running cluster, in real time, and tell what its clients saw.

    Beside `baton simulate`, whose figures these are too, or to load a cluster.
    Prompts share tokens where the trace's share blocks; an answer has exactly
    the trace's length. Times count from when a request was due. What does not
    fit the model is cut or left out, and counted. Ctrl-C ends it, with what was
    measured. Exit status 1: nothing was served.

    baton bench conversation.jsonl.gz --scale 64 --seconds 60    suits a laptop

    With --json it also tells what work costs here, for `baton simulate --costs`.
    """
    from deploy.lab.bench.command import Options, run
    from deploy.lab.traces.shape import TraceOptions

    part = TraceOptions(
        path=trace, speed=speed, requests=requests, from_s=from_s, seconds=seconds, scale=scale, block=block, seed=seed
    )
    options = Options(
        trace=part,
        address=address,
        api_key=api_key,
        max_output=max_output,
        concurrency=concurrency,
        vocab=vocab,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
    )
    if not run(options, as_json, console):
        raise typer.Exit(1)


@app.command()
def simulate(
    trace: TracePath = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers; 0: every worker does both.")] = 0,
    decode: Annotated[int, typer.Option(help="Workers that decode.")] = 8,
    blocks: Annotated[
        int | None, typer.Option(help="KV blocks of a worker.", show_default="5000, or as --costs says")
    ] = None,
    profile: Annotated[str, typer.Option(help="Model and GPUs of a worker; `list` names those known.")] = (
        "llama-3-70b@8xa100"
    ),
    costs: Annotated[
        Path | None, typer.Option(metavar="BENCH.json", help="Instead of --profile: from `baton bench --json`.")
    ] = None,
    pools: Annotated[
        list[str] | None, typer.Option(metavar="P:D", help="Instead of --prefill and --decode; once for each.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Once for each; all without it. `list` names them.")] = None,
    speed: Speed = 1.0,
    load: Annotated[list[float] | None, typer.Option(help="Rate of arrivals, times --speed; once for each.")] = None,
    requests: Requests = 0,
    from_s: FromS = 0.0,
    seconds: Seconds = 0.0,
    scale: Scale = 1,
    block: Block = None,
    max_output: MaxOutput = 0,
    ttft_ms: TtftMs = 5000.0,
    itl_ms: ItlMs = 100.0,
    seed: Annotated[int, typer.Option(help="Of whatever is random.")] = 0,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: one a core.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pictures (PNG) there.")] = None,
    tell_all: Annotated[
        bool, typer.Option("--tell-all", help="Workers know the objectives under the other policies too.")
    ] = False,
    error: Annotated[float, typer.Option(help="This router takes steps to cost so many times the truth.")] = 1.0,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="The pools are what to begin with; see BATON_AUTOSCALE_* settings.")
    ] = False,
    max_workers: Annotated[
        int | None,
        typer.Option(help="With --autoscale; 0: as many as there are.", show_default="autoscale.max_workers"),
    ] = None,
    start_s: Annotated[float, typer.Option(help="Until a worker that is started is ready.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through this router's placement and through those of others, in virtual time.

    Engines, schedulers and block pools are the production's. Steps cost what the
    profile's roofline says, or what they have cost on a real cluster:

    baton bench TRACE --scale 64 --json > bench.json

    baton simulate TRACE --scale 64 --costs bench.json --prefill 1 --decode 1
    """
    from deploy.lab.simulate.command import Options, run
    from deploy.lab.traces.shape import TraceOptions

    part = TraceOptions(
        path=trace, speed=speed, requests=requests, from_s=from_s, seconds=seconds, scale=scale, block=block, seed=seed
    )
    options = Options(
        trace=part,
        prefill=prefill,
        decode=decode,
        blocks=blocks,
        profile=profile,
        costs=costs,
        max_output=max_output,
        policies=tuple(policy or ()),
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        jobs=jobs,
        loads=tuple(load or ()),
        pools=tuple(pools or ()),
        plot=plot,
        tells_all=tell_all,
        error=error,
        autoscale=baton_config.load().autoscale if autoscale else None,
        max_workers=max_workers,
        start_s=start_s,
    )
    run(options, as_json, console)


def main() -> None:
    """Entry point: errors of ours become one sentence and exit status 1."""
    try:
        app()
    except BatonError as error:
        _print_error(error)
        sys.exit(1)


def _print_error(error: BaseException) -> None:
    console.print("error: ", style="red", end="")
    console.print(str(error), markup=False)


def _on_ready(settings: Config, ask: str | None, api_key: str) -> None:
    cluster = settings.cluster
    address = f"{cluster.host}:{cluster.grpc_port}"
    print(f"BATON READY grpc={address} http={cluster.host}:{cluster.http_port}", flush=True)  # noqa: T201
    if ask is not None:
        console.print(f"==> A sample request: baton generate {ask!r} --max-tokens 24", style="dim")
        console.print(ask, end="", style="bold", markup=False)
        try:
            sample = GenerateRequest(prompt=Text(ask), sampling={"max_tokens": 24, "temperature": 0.0})
            _generate(sample, Client(address, api_key), as_json=False)
        except BatonError as error:
            _print_error(error)
        console.print("==> Serving. Ctrl-C ends it; in another terminal: baton generate 'Hello'", style="dim")


def _generate(request: GenerateRequest, client: Client, as_json: bool) -> None:
    """Prints the answer, and closes the client."""
    chunks = []
    try:
        for chunk in client.generate(request):
            chunks.append(chunk)
            if not as_json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    finally:
        client.close()
    last = chunks[-1]
    if not as_json:
        sys.stdout.write("\n")
        return
    answer = {
        "request_id": last.request_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "usage": dataclasses.asdict(last.usage) if last.usage else None,
        "timing": dataclasses.asdict(last.timing) if last.timing else None,
    }
    print(json.dumps(answer, ensure_ascii=False))  # noqa: T201
