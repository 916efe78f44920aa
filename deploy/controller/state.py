"""Persistent state of the controller: a JSON file, always replaced as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cluster import MAX_WORKERS, Role
from baton.config import Config
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Change of role in progress. It changes neither pool's size until it is done."""

    worker_id: str
    role: Role
    """The new role."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep of the model, from when its pools are emptied until its wake-up is complete."""

    before: Mapping[Role, int]
    """Sizes of the pools before the sleep."""
    waking_since_s: float = 0.0
    """Unix time at which the wake-up started; 0: it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """Everything that survives the controller's process."""

    desired: Mapping[Role, int]
    cluster: str = ""
    """Ray namespace of the workers below. The sizes hold for any cluster."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Role of every worker that was started and has not left."""
    pools: Mapping[str, Role] = field(default_factory=dict)
    """Pool in which each worker was started. It runs on a node for that pool, independent of its current role."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings with which each worker was started (`Config.worker_settings`). Missing: a file of an earlier version."""
    retiring: frozenset[str] = frozenset()
    """Workers that must leave."""
    role_change: RoleChange | None = None
    gpus_per_worker: Mapping[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
    """GPUs per worker of each pool, constant for the life of a cluster: a replacement gets the GPUs of the worker that
    left."""
    sleep: Sleep | None = None
    """None: the model is awake, or an operator has scaled its decode pool to 0."""
    wake_s: float = 0.0
    """Time from the request that ended the latest sleep to the first ready decode worker; 0: there was no sleep."""
    files: str = ""
    """Digest of the model's files as announced; empty: no worker has reported one yet."""
    created_s: int = 0
    """Unix time of the model's first announcement."""

    def is_changing_role(self, worker_id: str) -> bool:
        return self.role_change is not None and self.role_change.worker_id == worker_id


class StateFile:
    """Current state, and the file that holds it."""

    def __init__(self, path: Path, current: ControllerState) -> None:
        self.current = current
        self._path = path

    def write(self, state: ControllerState) -> None:
        """Write and adopt the state. Raises ConfigError if the file cannot be written; `current` is then unchanged."""
        save(self._path, state)
        self.current = state


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Context manager: locks the state file against other controllers.

    Raises:
        ConfigError: another controller has the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(f".{path.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"cluster.state_file: {path} is in use by another cluster, which runs or is shutting down; use a "
                "separate file for every cluster"
            ) from None
        except OSError as error:
            raise ConfigError(f"cluster.state_file: cannot lock {path}: {error}") from error
        yield


def load(path: Path) -> ControllerState | None:
    """Return the state in the file; None: the file does not exist yet.

    Raises:
        ConfigError: the file cannot be read, or is no state file.
    """
    try:
        values = json.loads(path.read_text())
        flip = values["flip"]
        return ControllerState(
            desired={role: int(values["desired"][role.value]) for role in Role},
            cluster=str(values["cluster"]),
            roles=_by_worker(values["workers"]),
            pools=_by_worker(values.get("pools", {})),  # a file of an earlier version has none
            settings={str(worker_id): str(text) for worker_id, text in values.get("settings", {}).items()},
            retiring=frozenset(values["retiring"]),
            role_change=RoleChange(flip["worker"], Role(flip["role"])) if flip else None,
            gpus_per_worker=_gpus(values["gpus_per_worker"]),
            sleep=_sleep(values.get("sleep")),  # a file of an earlier version has none, nor any of those below
            wake_s=_seconds(values.get("wake_s", 0)),
            files=str(values.get("files", "")),
            created_s=int(_seconds(values.get("created_s", 0))),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cluster.state_file: cannot use {path}: {error!r}; move it away to start afresh") from error


def _by_worker(values: Mapping[str, str]) -> dict[str, Role]:
    return {str(worker_id): Role(role) for worker_id, role in values.items()}


def _gpus(value: Any) -> dict[Role, float]:
    """Return the GPUs per worker of each pool; an earlier version had one number for both."""
    return {role: float(value[role.value] if isinstance(value, dict) else value) for role in Role}


def _sleep(values: Any) -> Sleep | None:
    if values is None:
        return None
    before = {role: int(values["before"][role.value]) for role in Role}
    return Sleep(before, _seconds(values["waking_since_s"]))


def _seconds(value: Any) -> float:
    if not 0 <= (seconds := float(value)) < math.inf:
        raise ValueError(f"{seconds} is no number of seconds")
    return seconds


def save(path: Path, state: ControllerState) -> None:
    """Replace the file atomically: a reader sees either the old state or the new one.

    Raises:
        ConfigError: the file cannot be written.
    """
    values = {
        "desired": {role.value: size for role, size in state.desired.items()},
        "cluster": state.cluster,
        "workers": {worker_id: role.value for worker_id, role in state.roles.items()},
        "pools": {worker_id: pool.value for worker_id, pool in state.pools.items()},
        "settings": dict(state.settings),
        "retiring": sorted(state.retiring),
        "flip": {"worker": state.role_change.worker_id, "role": state.role_change.role.value}
        if state.role_change
        else None,
        "gpus_per_worker": {role.value: gpus for role, gpus in state.gpus_per_worker.items()},
        "sleep": state.sleep
        and {
            "before": {role.value: size for role, size in state.sleep.before.items()},
            "waking_since_s": state.sleep.waking_since_s,
        },
        "wake_s": state.wake_s,
        "files": state.files,
        "created_s": state.created_s,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cluster.state_file: cannot write {path}: {error}") from error


def starting_sizes(config: Config) -> tuple[Mapping[Role, int], bool]:
    """Return the initial pool sizes, and whether they come from `cluster.state_file`.

    A model that slept starts with the sizes that it had before.

    Raises:
        ConfigError: pools of these sizes cannot serve, or the file cannot be read.
    """
    cluster = config.cluster
    state = load(Path(cluster.state_file)) if cluster.state_file else None
    desired: Mapping[Role, int] = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode}
    if state:
        desired = state.sleep.before if state.sleep else state.desired
    if reason := sizes_problem(desired, config, must_serve=True):
        sizes = f"--prefill {desired[Role.PREFILL]} --decode {desired[Role.DECODE]}"
        raise ConfigError(f"{f'{cluster.state_file} asks for ' if state else ''}{sizes}: {reason}")
    return desired, state is not None


def sizes_problem(desired: Mapping[Role, int], config: Config, *, must_serve: bool = False) -> str:
    """Return the reason why pools must not have these sizes; empty: they may.

    Args:
        must_serve: refuse an empty decode pool even if the model may sleep.
    """
    prefill, decode = desired[Role.PREFILL], desired[Role.DECODE]
    if decode == 0 and not (config.autoscale.may_sleep and not must_serve):
        least = "there must be at least 1 decode worker"
        return least if must_serve else f"{least}, unless the model may sleep (autoscale.min_decode 0)"
    if min(prefill, decode) < 0 or prefill + decode > MAX_WORKERS:
        return f"there must be at most {MAX_WORKERS} workers in all"
    if decode and prefill < min_workers(Role.PREFILL, config):
        return "router.mode is disaggregated, which needs at least one prefill worker; use --prefill 1"
    return ""


def min_workers(role: Role, config: Config) -> int:
    """Return the minimum number of workers with which a pool can serve."""
    return int(role is Role.DECODE or config.router.mode == "disaggregated")
