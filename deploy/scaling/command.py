"""`baton autoscale --dry-run`: shows the autoscaler's decision for a running cluster, with reasons."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.cluster import (
    BlockCounts,
    ClusterStatus,
    PoolStatus,
    Role,
    RoutedModel,
    RouterInfo,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.costs import StepCosts
from baton.errors import InvalidRequest
from deploy.say import say
from deploy.scaling.autoscaler import Autoscaler
from deploy.scaling.window import of_model
from deploy.terminal import Terminal

if TYPE_CHECKING:
    from baton.config import Config
    from deploy.operator.client import Client
    from deploy.scaling.values import ScalingDecision


AT_ONCE_S = 1e-3
"""Cool-down that ends before the first window does."""


class _NoOrders:
    """Commands of a dry run, which must not be called."""

    async def scale(self, pool: Role, num_workers: int) -> None:
        raise AssertionError("a dry run orders nothing")

    async def set_role(self, worker_id: str, role: Role) -> None:
        raise AssertionError("a dry run orders nothing")

    async def sleep(self) -> None:
        raise AssertionError("a dry run orders nothing")


def run(client: Client, config: Config, seconds: float, watch: bool, as_json: bool) -> None:
    """Measure one window of `seconds`, or consecutive ones, and print the decision of each.

    Without `watch` there is no cool-down, as if nothing had changed recently. Raises BatonError if the cluster does not
    answer.
    """
    asyncio.run(_run(client, config, seconds, watch, as_json))


async def _run(client: Client, config: Config, seconds: float, watch: bool, as_json: bool) -> None:
    cool_down_s = config.autoscale.cool_down_s if watch else AT_ONCE_S
    scaling = replace(config.autoscale, dry_run=True, window_s=seconds, cool_down_s=cool_down_s)
    config = replace(config, autoscale=scaling)

    async def observe() -> ClusterStatus:
        return status_of(await asyncio.to_thread(client.status))

    autoscaler = Autoscaler(config, observe, _NoOrders(), on_decided=lambda decision: show(decision, as_json))
    await observe()  # an unreachable cluster is reported immediately
    Terminal(stderr=True, highlight=False).print(f"==> Measuring for {seconds:g} s", style="dim")
    if watch:
        await autoscaler.run()
    await autoscaler.step()
    await asyncio.sleep(seconds)
    await autoscaler.step()


def show(decision: ScalingDecision, as_json: bool) -> None:
    if as_json:
        say(json.dumps(as_dict(decision)))
        return
    out = Terminal(soft_wrap=True, highlight=False)
    for reason in decision.reasons:
        out.print(reason)
    out.print(f"=> {summary(decision)}")


def summary(decision: ScalingDecision) -> str:
    """Return the changes, in their order."""
    orders = []
    if flips := decision.flips:
        verb = "becomes" if flips.num == 1 else "become"
        orders.append(f"{flips.num} of the other pool {verb} {flips.role}")
    for verb, sizes in (("start", decision.starts), ("stop", decision.stops)):
        orders += [f"{verb} {sizes.of(role)} {role}" for role in Role if sizes.of(role)]
    return f"{decision.before} -> {decision.sizes}: {'; '.join(orders)}" if orders else f"{decision.before} stays"


def as_dict(decision: ScalingDecision) -> dict[str, Any]:
    """Return the decision of one window, for JSON output."""

    def by_role(sizes: Any) -> dict[str, int]:
        return {role.value: sizes.of(role) for role in Role}

    return {
        "before": by_role(decision.before),
        "sizes": by_role(decision.sizes),
        "flips": {"num": decision.flips.num, "role": decision.flips.role.value} if decision.flips else None,
        "starts": by_role(decision.starts),
        "stops": by_role(decision.stops),
        "needs": {
            "prefill": decision.needs.prefill,
            "decode": decision.needs.decode,
            "backlog": decision.needs.backlog,
        },
        "reasons": list(decision.reasons),
    }


def status_of(report: dict[str, Any]) -> ClusterStatus:
    """Return the cluster's state from `baton status --json`, as far as the autoscaler reads it.

    Raises:
        InvalidRequest: it has several models, whose loads have nothing to do with each other.
    """
    if len(models := report.get("models", ())) > 1:
        names = ", ".join(sorted(str(model.get("release") or model["id"]) for model in models))
        raise InvalidRequest(f"the endpoint serves several models; choose one of {names} with --model", "model")
    content_id = models[0].get("content_id", "") if models else ""
    return ClusterStatus(
        pools={name: _pool(pool) for name, pool in report["pools"].items()},
        workers=tuple(_worker(worker) for worker in report["workers"]),
        routers=tuple(of_model(_router(router), content_id) for router in report["routers"]),
        redis_address=report["redis"]["address"],
        redis_ok=report["redis"]["ok"],
        models=(),
    )


def _pool(report: dict[str, Any]) -> PoolStatus:
    return PoolStatus(report["desired"], report["ready"], tuple(report.get("engine", ())))  # an older release has none


def _router(report: dict[str, Any]) -> RouterInfo:
    return RouterInfo(
        id=report["id"],
        pid=report["pid"],
        grpc=report["grpc"],
        http=report["http"],
        mirror_lag_s=report["mirror_lag_s"],
        met=report["met"],
        missed=report["missed"],
        rejected=report["rejected"],
        models=tuple(
            RoutedModel(
                content_id=model["content_id"],
                met=model["met"],
                missed=model["missed"],
                rejected=model["rejected"],
                in_flight=model["in_flight"],
                held=model["held"],
            )
            for model in report.get("models", ())  # an older release has none
        ),
    )


def _worker(report: dict[str, Any]) -> Worker:
    info = WorkerInfo(
        id=report["id"],
        role=Role(report["role"]),
        address=report["address"],
        pid=report["pid"],
        node=report["node"],
        epoch=report["epoch"],
        content_id="",
        wire_compat="",
        block_size=report["block_size"],
        max_model_len=0,
        chunk_tokens=report["chunk_tokens"],
    )
    load = WorkerLoad(
        state=WorkerState(report["state"]),
        running=report["running"],
        waiting=report["waiting"],
        queued_tokens=report["queued_tokens"],
        blocks=BlockCounts(**report["blocks"]),
        costs=StepCosts(**report["costs"]) if report.get("costs") else WorkerLoad().costs,
        busy_s=report["busy_s"],
        computed_tokens=report["computed_tokens"],
    )
    return Worker(info, load)
