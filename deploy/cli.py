"""The `baton` command."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from baton import config as baton_config
from baton.api import Chat, ChatMessage, GenerateRequest, Prompt, Text
from baton.config import Config
from baton.errors import BatonError
from baton.telemetry import logs
from deploy.client import Client

app = typer.Typer(
    help="Baton: disaggregated serving of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True, soft_wrap=True, highlight=False)

Address = Annotated[str, typer.Option(help="Router, host:port.", envvar="BATON_ADDRESS")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command()
def up(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.  [default: 1]")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.  [default: 1]")] = None,
    model: Annotated[
        str | None, typer.Option(help="A hub id, a local folder, or smollm2-135m-instruct (the default).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    ask: Annotated[str | None, typer.Option(help="A prompt to answer once the cluster is ready.")] = None,
) -> None:
    """Serve a model on this machine: Redis, Ray, both pools and the router. Ctrl-C ends all of it.

    Prints `BATON READY grpc=HOST:PORT http=HOST:PORT` when it takes requests. Ports: BATON_GRPC_PORT, BATON_HTTP_PORT.
    """
    from deploy.up import up as run_up

    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level)
    cluster = settings.cluster
    cluster = dataclasses.replace(
        cluster,
        prefill=cluster.prefill if prefill is None else prefill,
        decode=cluster.decode if decode is None else decode,
    )
    settings = dataclasses.replace(settings, cluster=cluster)
    if model is not None:
        settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, id=model))
    asyncio.run(run_up(settings, console, lambda ready: _on_ready(ready, ask)))


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the model's default if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the text as a user's message in a chat.")] = False,
    address: Address = baton_config.DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Stream an answer to a prompt."""
    prompt: Prompt = Chat((ChatMessage("user", text),)) if chat else Text(text)
    optional = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = {name: value for name, value in optional.items() if value is not None}
    _generate(GenerateRequest(prompt, sampling=sampling), address, as_json)


@app.command()
def status(address: Address = baton_config.DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Show pools, workers, routers and Redis."""
    client = Client(address)
    try:
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
    out.print(f"redis {report['redis']['address']}: {'ok' if report['redis']['ok'] else 'not reachable'}")


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """One row a worker, of `baton status --json`, with its KV blocks; nothing is cut in a terminal of 80 columns."""
    table = _table("worker", "state", "pid", "address", "run/wait", "free/cached/used", "check")
    for worker in workers:
        blocks = worker["blocks"]
        table.add_row(
            *(str(worker[name]) for name in ("id", "state", "pid", "address")),
            f"{worker['running']}/{worker['waiting']}",
            f"{blocks['free']}/{blocks['cached']}/{blocks['in_use']}",
            worker["self_check"],
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


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


@app.command()
def doctor(
    address: Annotated[
        str, typer.Option(help="Router, host:port; else the configured port.", envvar="BATON_ADDRESS")
    ] = "",
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the installation, and the cluster if one runs, and say how to mend what is wrong."""
    from deploy.doctor import diagnose, show

    settings = baton_config.load(config)
    checks = diagnose(settings, address or f"{settings.cluster.host}:{settings.cluster.grpc_port}")
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))  # noqa: T201
    else:
        show(checks, Console())
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


@app.command()
def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Mooncake .jsonl or Azure .csv, also .gz; a generated conversation without it."),
    ] = None,
    prefill: Annotated[int, typer.Option(help="Prefill workers; 0: every worker does both.")] = 0,
    decode: Annotated[int, typer.Option(help="Workers that decode.")] = 8,
    blocks: Annotated[int, typer.Option(help="KV blocks of a worker.")] = 5000,
    profile: Annotated[str, typer.Option(help="Model and GPUs of a worker; `list` names those known.")] = (
        "llama-3-70b@8xa100"
    ),
    policy: Annotated[list[str] | None, typer.Option(help="Once for each; all without it. `list` names them.")] = None,
    speed: Annotated[float, typer.Option(help="Rate of arrivals, times the trace's own.")] = 1.0,
    requests: Annotated[int, typer.Option(help="Of the trace's beginning; 0: all.")] = 0,
    ttft_ms: Annotated[float, typer.Option(help="Objective: time to first token.")] = 5000.0,
    itl_ms: Annotated[float, typer.Option(help="Objective: mean time between tokens of a request.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Of whatever is random.")] = 0,
    jobs: Annotated[int, typer.Option(help="Policies simulated at a time; 0: one a core.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through this router's placement and through those of others, in virtual time.

    Engines, schedulers and block pools are the production's; steps cost what the profile's roofline says.
    """
    from deploy.simulate.command import Options, run

    options = Options(
        trace, prefill, decode, blocks, profile, tuple(policy or ()), speed, requests, ttft_ms, itl_ms, seed, jobs
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


def _on_ready(settings: Config, ask: str | None) -> None:
    cluster = settings.cluster
    address = f"{cluster.host}:{cluster.grpc_port}"
    print(f"BATON READY grpc={address} http={cluster.host}:{cluster.http_port}", flush=True)  # noqa: T201
    if ask is not None:
        console.print(f"==> A sample request: baton generate {ask!r} --max-tokens 24", style="dim")
        console.print(ask, end="", style="bold", markup=False)
        try:
            sample = GenerateRequest(Text(ask), sampling={"max_tokens": 24, "temperature": 0.0})
            _generate(sample, address, as_json=False)
        except BatonError as error:
            _print_error(error)
        console.print("==> Serving. Ctrl-C ends it; in another terminal: baton generate 'Hello'", style="dim")


def _generate(request: GenerateRequest, address: str, as_json: bool) -> None:
    client = Client(address)
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


if __name__ == "__main__":
    main()
