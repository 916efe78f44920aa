"""Commands of an operator: they look at a running cluster and change it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Console

from baton import config as baton_config
from baton.errors import ConfigError, InvalidRequest
from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES
from baton.tls import Tls, own_door_tls
from deploy.cli.options import (
    Address,
    ApiKey,
    AsJson,
    ClientOptions,
    ConfigFile,
    TimeoutS,
    console,
    options_from_fields,
)
from deploy.operator.client import Access, Client
from deploy.operator.explain import print_requests, print_timelines
from deploy.operator.tables import print_status
from deploy.operator.trust import TrustOptions

WorkerId = Annotated[str, typer.Argument(help="The worker's id, as shown by `baton status`.")]


@options_from_fields
def scale_pool(
    pool: Annotated[str, typer.Argument(help="prefill or decode.")],
    num_workers: Annotated[int, typer.Argument(metavar="N", min=0, help="The number of workers it should have.")],
    target: ClientOptions,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until the pool has them.")] = True,
    timeout_s: TimeoutS = 600.0,
    force: Annotated[
        bool, typer.Option("--force", help="Even if they do not fit on the machine that has all workers.")
    ] = False,
) -> None:
    """Set the number of workers of a pool. Workers that leave hand over their work.

    Where all workers are on one machine, those that its memory or its GPUs have no
    room for are refused.
    """
    from deploy.operator.orders import scale

    with contextlib.closing(target.client()) as client:
        scale(
            client,
            console,
            pool,
            num_workers,
            timeout_s=timeout_s if wait else 0,
            as_json=target.as_json,
            is_forced=force,
        )


@options_from_fields
def drain(worker: WorkerId, target: ClientOptions, timeout_s: TimeoutS = 600.0) -> None:
    """Remove a worker: its work goes to others, and another one takes its place. Waits until it is gone."""
    from deploy.operator.orders import drain

    with contextlib.closing(target.client()) as client:
        drain(client, console, worker, timeout_s, target.as_json)


@options_from_fields
def role(
    worker: WorkerId, role: Annotated[str, typer.Argument(help="prefill or decode.")], target: ClientOptions
) -> None:
    """Move a worker to the other pool, with its cache; both pools' sizes follow."""
    from deploy.operator.orders import set_role

    with contextlib.closing(target.client()) as client:
        set_role(client, console, worker, role, target.as_json)


@options_from_fields
def status(
    target: ClientOptions,
    explain: Annotated[
        str,
        typer.Option(
            metavar="REQUEST", help="Show where the time of the request with this id went, and how it was placed."
        ),
    ] = "",
    live: Annotated[
        bool, typer.Option("--watch", help="Show goodput, latencies and workers, updated every second.")
    ] = False,
) -> None:
    """Show pools, workers, routers, controller and Redis; or where the time of a request went."""
    if live:
        from deploy.operator.watch import watch

        if explain or target.as_json:
            raise InvalidRequest("--watch shows a picture that changes; leave out --explain and --json")
        watch(target.address, Console(), Access(target.api_key, target.read()))
        return
    with contextlib.closing(target.client()) as client:
        if explain:
            print_timelines(client.timelines(explain), explain, target.as_json)
            return
        report = client.status()
    if target.as_json:
        print(json.dumps(report, indent=2))  # noqa: T201
    else:
        print_status(report)


@options_from_fields
def requests(
    target: ClientOptions,
    tenant: Annotated[str, typer.Option(help="Those of this tenant alone.")] = "",
    slo_class: Annotated[str, typer.Option("--class", help="Those of this SLO class alone.")] = "",
    outcome: Annotated[
        list[str] | None,
        typer.Option(help=f"Those of which this became: {', '.join(OUTCOMES)}. Several times: any of these."),
    ] = None,
    limit: Annotated[int, typer.Option(help="How many, at most.", min=1, max=MAX_LIMIT)] = DEFAULT_LIMIT,
) -> None:
    """List the latest requests: what became of them, and where their time went. Nothing of their content."""
    with contextlib.closing(target.client()) as client:
        found = client.requests(tenant=tenant, slo_class=slo_class, outcomes=outcome or (), limit=limit)
    print_requests(found, target.as_json)


@options_from_fields
def autoscale(
    trust: TrustOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the decision and its reasons; there is no other mode.")
    ] = False,
    address: Address = baton_config.DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    seconds: Annotated[
        float | None, typer.Option(help="Duration of the measurement.", show_default="autoscale.window_s", min=0.1)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat, window after window, with the cool-downs between changes.")
    ] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a running cluster for a while, and show how the autoscaler would size its pools.

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
    with contextlib.closing(Client(address, api_key, trust.read())) as client:
        run(client, settings, seconds or settings.autoscale.window_s, watch, as_json)


def _door(settings: baton_config.Config, address: str, trust: TrustOptions) -> Tls | None:
    """How a router is spoken to: as the options say, else, if it is the configured one, as the settings do."""
    try:
        return trust.read() or (None if address else own_door_tls(settings))
    except ConfigError:
        return None  # a check of the files says so


@options_from_fields
def doctor(
    trust: TrustOptions,
    address: Annotated[
        str, typer.Option(help="The router, host:port. Without it, the configured port.", envvar="BATON_ADDRESS")
    ] = "",
    part: Annotated[
        str,
        typer.Option(
            help="laptop, cluster; or router, controller, worker: what that container needs in order to start."
        ),
    ] = "laptop",
    config: ConfigFile = None,
    api_key: ApiKey = "",
    wait_s: Annotated[
        float, typer.Option("--wait", help="Time, in seconds, in which to repeat the checks while one fails.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and the cluster if one runs, and say how to mend what is wrong.

    Changes nothing. Exit status 1: a check failed.
    """
    from deploy.doctor import DoctorPart, diagnose, not_configured, show

    if part not in list(DoctorPart):
        raise InvalidRequest(f"--part must be one of {', '.join(DoctorPart)}; got {part!r}")
    end_s = time.monotonic() + wait_s
    while True:
        try:
            settings = baton_config.load(config)
        except ConfigError as error:
            checks = not_configured(error)
            break
        router = address or f"{settings.cluster.host}:{settings.cluster.grpc_port}"
        checks = diagnose(settings, router, DoctorPart(part), Access(api_key, _door(settings, address, trust)))
        if all(check.state != "fail" for check in checks) or time.monotonic() >= end_s:
            break
        time.sleep(1)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))  # noqa: T201
    else:
        show(checks, Console())
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)
