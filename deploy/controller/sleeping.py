"""Sleep of a model: transitions of the controller's state, and the reasons why a wake-up makes no progress. Pure.

                      autoscaler: no request for autoscale.idle_s
    AWAKE ─────────────────────────────────────────────────────────────> ASLEEP, both pools are empty
      ^                                                                    │  a router has a request, or an operator or
      │ a decode worker is ready,                                          │  KEDA has scaled the decode pool
      └ in mode disaggregated a prefill worker too ── WAKING <─────────────┘

If an operator scales the decode pool to 0, the model is not asleep, and no request wakes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from baton.cluster import MAX_REASON, Role
from baton.config import Config
from baton.visible import in_line
from deploy.controller.reconcile import ObservedWorker, num_serving
from deploy.controller.state import ControllerState, Sleep, min_workers

EMPTY: Mapping[Role, int] = dict.fromkeys(Role, 0)


def fallen_asleep(state: ControllerState) -> ControllerState:
    """Return the state of a model that was awake and sleeps now."""
    return replace(state, desired=EMPTY, sleep=Sleep(before=state.desired))


def resized(state: ControllerState, desired: Mapping[Role, int], now_s: float) -> ControllerState:
    """Return the state with new sizes. If the model sleeps, a size of the decode pool above 0 starts a wake-up.

    If the decode pool is set back to 0 during a wake-up, the wake-up ends, and the model remains asleep.

    Args:
        now_s: Unix time.
    """
    sleep = state.sleep
    if sleep is not None:
        since_s = (sleep.waking_since_s or now_s) if desired[Role.DECODE] else 0.0
        sleep = replace(sleep, waking_since_s=since_s)
    return replace(state, desired=desired, sleep=sleep)


def wake_sizes(state: ControllerState, sleep: Sleep, config: Config) -> dict[Role, int]:
    """Return the sizes with which a model that sleeps wakes.

    Each pool starts with at most one worker, and the autoscaler adds more. If it may not, because
    `autoscale.max_workers` is 0, the pools get the sizes that they had before the sleep.
    """
    before = {role: max(sleep.before[role], min_workers(role, config)) for role in Role}
    if config.router.mode == "aggregated":
        before[Role.PREFILL] = 0
    if config.autoscale.may_sleep and config.autoscale.max_workers:
        before = {role: min(size, 1) for role, size in before.items()}
    return {role: max(size, state.desired[role]) for role, size in before.items()}


def awoken(
    state: ControllerState, workers: Collection[ObservedWorker], config: Config, now_s: float
) -> ControllerState | None:
    """Return the state after a complete wake-up; None: the wake-up is not complete, or the model was not asleep.

    Args:
        now_s: Unix time.
    """
    sleep = state.sleep
    if sleep is None or not sleep.waking_since_s:
        return None
    if any(num_serving(workers, role) < min_workers(role, config) for role in Role):
        return None
    return replace(state, sleep=None, wake_s=round(max(now_s - sleep.waking_since_s, 0.001), 3))


def wake_problem(
    state: ControllerState, workers: Collection[ObservedWorker], failures: Mapping[str, str], refusal: str
) -> str:
    """Return the reason why a model that should wake does not; empty: it need not wake, or none is known.

    Args:
        failures: last error of each worker that has failed to start, by worker id.
        refusal: reason why the latest wake-up could not start; empty: it could.
    """
    if state.sleep is None:
        return ""
    if not state.desired[Role.DECODE]:
        return _bounded(refusal)
    reasons = []
    for role in (Role.DECODE, Role.PREFILL):
        pool = [worker for worker in workers if worker.role is role and not worker.is_retiring]
        if num_serving(pool, role):
            continue
        if num := sum(worker.waits_for_room for worker in pool):
            reasons.append(f"no node has room for {num} {role} worker{'s' if num > 1 else ''}")
        reasons += [
            f"{worker.id} ({role}) does not start: {failures[worker.id]}" for worker in pool if worker.id in failures
        ]
    return _bounded("; ".join(reasons))


def _bounded(reason: str) -> str:
    return in_line(reason)[:MAX_REASON]
