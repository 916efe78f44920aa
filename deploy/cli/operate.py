"""Commands of an operator, which show and change a running cluster."""

from __future__ import annotations

import contextlib
import json
from enum import StrEnum
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
    ModelOptions,
    TimeoutS,
    console,
    options_from_fields,
)
from deploy.operator.trust import TrustOptions
from deploy.say import say


class AdapterAction(StrEnum):
    """Action of `baton adapters`."""

    ADD = "add"
    REMOVE = "remove"
    LIST = "list"


WorkerId = Annotated[str, typer.Argument(help="Worker id, as shown by `baton status`.")]


@options_from_fields
def scale_pool(
    pool: Annotated[str, typer.Argument(help="prefill or decode.")],
    num_workers: Annotated[int, typer.Argument(metavar="N", min=0, help="Desired number of workers.")],
    target: ModelOptions,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until the pool has this number of ready workers.")] = True,
    timeout_s: TimeoutS = 600.0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Scale even if the workers would not fit in the memory or GPUs of their machine."),
    ] = False,
) -> None:
    """Set the number of workers in a pool. Workers that stop migrate their requests first.

    If all workers run on one machine, a number that exceeds its memory or its GPUs
    is refused.
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
def drain(worker: WorkerId, target: ModelOptions, timeout_s: TimeoutS = 600.0) -> None:
    """Drain a worker: its requests migrate to other workers, and a new worker replaces it. Waits until it is gone."""
    from deploy.operator.orders import drain

    with contextlib.closing(target.client()) as client:
        drain(client, console(), worker, timeout_s, target.as_json)


@options_from_fields
def role(
    worker: WorkerId,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    target: ModelOptions,
    force: Annotated[bool, typer.Option("--force", help="Change the role even if the pool becomes empty.")] = False,
) -> None:
    """Move a worker with its cache to the other pool, and adjust the sizes of both pools.

    A worker keeps its engine, so this is refused if the engines of the pools differ: see `baton status`.
    """
    from deploy.operator.orders import set_role

    with contextlib.closing(target.client()) as client:
        set_role(client, console(), worker, role, target.as_json, is_forced=force)


@options_from_fields
def wake(
    model: Annotated[str, typer.Argument(help="Model: its name, its release or its content id.")],
    target: ClientOptions,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until the model is ready.")] = True,
    timeout_s: TimeoutS = 600.0,
) -> None:
    """Start the workers of a model that sleeps, before a request does. A model that is awake is left as it is."""
    from deploy.operator.client import Client
    from deploy.operator.orders import wake

    with contextlib.closing(Client(target.address, target.api_key, target.read(), model=model)) as client:
        wake(client, console(), model, timeout_s=timeout_s if wait else 0, as_json=target.as_json)


@options_from_fields
def adapters(
    action: Annotated[AdapterAction, typer.Argument(help="What to do.")],
    target: ModelOptions,
    name: Annotated[str, typer.Argument(help="Name of the adapter, for add and remove.", show_default=False)] = "",
    path: Annotated[
        str, typer.Argument(help="Folder with adapter_config.json and the weights, for add.", show_default=False)
    ] = "",
) -> None:
    """List, add or remove LoRA adapters, which clients request by name like models.

    `add NAME PATH` has one worker check the folder. All workers load it from the
    same path when a request needs it, so every worker must be able to read it. A
    name that exists gets the new weights; running requests keep the old ones.
    `remove NAME` lets running requests complete. Workers serve adapters if
    engine.max_adapters is set.
    """
    from deploy.operator.adapters import manage

    with contextlib.closing(target.client()) as client:
        manage(client, action.value, name, path, target.as_json)


@options_from_fields
def status(
    target: ModelOptions,
    explain: Annotated[
        str,
        typer.Option(metavar="REQUEST", help="Show the timeline and the placement of the request with this id."),
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
            raise InvalidRequest("--watch cannot be combined with --explain or --json")
        watch(target.address, Terminal(), Access(target.api_key, target.read()), model=target.model)
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
    tenant: Annotated[str, typer.Option(help="List only requests of this tenant.")] = "",
    slo_class: Annotated[str, typer.Option("--class", help="List only requests of this SLO class.")] = "",
    outcome: Annotated[
        list[str] | None,
        typer.Option(help=f"List only requests with this outcome: {', '.join(OUTCOMES)}. May be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of requests.", min=1, max=MAX_LIMIT)] = DEFAULT_LIMIT,
) -> None:
    """List the latest requests with their outcome and timing, without their content."""
    from deploy.operator.explain import print_requests

    with contextlib.closing(target.client()) as client:
        found = client.requests(tenant=tenant, slo_class=slo_class, outcomes=outcome or (), limit=limit)
    print_requests(found, target.as_json)


@options_from_fields
def autoscale(
    trust: TrustOptions,
    model: Annotated[
        str, typer.Option(help="Model, if there are several: its name, its release or its content id.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the decision and its reasons. Required; no other mode exists.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    seconds: Annotated[
        float | None,
        typer.Option(help="Duration of the measurement, in seconds.", show_default="autoscale.window_s", min=0.1),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat for each window, with the cool-down after each change.")
    ] = False,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure a running cluster, and show how the autoscaler would size its pools.

    Objectives and limits come from the configuration: router.slo_classes (the
    strictest) and autoscale. If autoscale.enabled is set, the cluster's controller
    scales the pools itself.
    """
    from baton import config as baton_config
    from deploy.operator.client import Client
    from deploy.scaling.command import run

    if not dry_run:
        raise InvalidRequest(
            "this command cannot change the pools: set --dry-run, or start the cluster with "
            "BATON_AUTOSCALE_ENABLED=true so that the controller changes them"
        )
    settings = baton_config.load(config)
    with contextlib.closing(Client(address, api_key, trust.read(), model=model)) as client:
        run(client, settings, seconds or settings.autoscale.window_s, watch, as_json)
