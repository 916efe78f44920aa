"""Commands of an operator: they look at a running cluster and change it."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer

from baton.addresses import DEFAULT_ADDRESS
from baton.errors import InvalidRequest
from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES
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
from deploy.operator.trust import TrustOptions
from deploy.say import say

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
    """Set the number of workers in a pool. Workers that leave migrate their requests.

    Where all workers are on one machine, those that its memory or its GPUs have no
    room for are refused.
    """
    from deploy.operator.orders import scale

    with contextlib.closing(target.client()) as client:
        scale(
            client,
            console(),
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
        drain(client, console(), worker, timeout_s, target.as_json)


@options_from_fields
def role(
    worker: WorkerId,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    target: ClientOptions,
    force: Annotated[bool, typer.Option("--force", help="Even if that leaves its pool without a worker.")] = False,
) -> None:
    """Move a worker and its cache to the other pool, and adjust the sizes of both pools."""
    from deploy.operator.orders import set_role

    with contextlib.closing(target.client()) as client:
        set_role(client, console(), worker, role, target.as_json, is_forced=force)


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
    """Show the state of the cluster, or with --explain a request's timeline."""
    if live:
        from deploy.operator.client import Access
        from deploy.operator.watch import watch
        from deploy.terminal import Terminal

        if explain or target.as_json:
            raise InvalidRequest("--watch shows a picture that changes; leave out --explain and --json")
        watch(target.address, Terminal(), Access(target.api_key, target.read()))
        return
    with contextlib.closing(target.client()) as client:
        if explain:
            from deploy.operator.explain import print_timelines

            print_timelines(client.timelines(explain), explain, target.as_json)
            return
        report = client.status()
    if target.as_json:
        say(json.dumps(report, indent=2))
    else:
        from deploy.operator.tables import print_status

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
    """List the latest requests with their outcome and where their time went, without their content."""
    from deploy.operator.explain import print_requests

    with contextlib.closing(target.client()) as client:
        found = client.requests(tenant=tenant, slo_class=slo_class, outcomes=outcome or (), limit=limit)
    print_requests(found, target.as_json)


@options_from_fields
def autoscale(
    trust: TrustOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the decision and its reasons; there is no other mode.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
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
    from baton import config as baton_config
    from deploy.operator.client import Client
    from deploy.scaling.command import run

    if not dry_run:
        raise InvalidRequest(
            "the controller changes the pools: start the cluster with BATON_AUTOSCALE_ENABLED=true, or give --dry-run"
        )
    settings = baton_config.load(config)
    with contextlib.closing(Client(address, api_key, trust.read())) as client:
        run(client, settings, seconds or settings.autoscale.window_s, watch, as_json)
