"""What the controller has to know when it comes back: a file of JSON, replaced whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.cluster import MAX_WORKERS, Role
from baton.config import Config
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flip:
    """A change of role that has begun. It counts for neither pool's size until it is done."""

    worker_id: str
    role: Role
    """The one that the worker is to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    desired: Mapping[Role, int]
    cluster: str = ""
    """The Ray namespace of the workers that the rest is about. The sizes are good for any cluster."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Of every worker that was started and has not left."""
    retiring: frozenset[str] = frozenset()
    """Workers that have to leave."""
    flip: Flip | None = None
    gpus_per_worker: float = 0.0
    """The same for the life of a cluster: what a worker leaves has to suit the one that takes its place."""


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """No other controller has this state file while the block is entered, or this process lives.

    Raises:
        ConfigError: another one has it.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_name(f".{path.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"cluster.state_file: {path} is in use by another cluster, which runs or is about to end; give every "
                "cluster a file of its own"
            ) from None
        except OSError as error:
            raise ConfigError(f"cluster.state_file: cannot lock {path}: {error}") from error
        yield


def load(path: Path) -> State | None:
    """None: there is no such file yet.

    Raises:
        ConfigError: it cannot be read, or is not a controller's.
    """
    try:
        values = json.loads(path.read_text())
        flip = values["flip"]
        return State(
            desired={role: int(values["desired"][role.value]) for role in Role},
            cluster=str(values["cluster"]),
            roles={str(worker_id): Role(role) for worker_id, role in values["workers"].items()},
            retiring=frozenset(values["retiring"]),
            flip=Flip(flip["worker"], Role(flip["role"])) if flip else None,
            gpus_per_worker=float(values["gpus_per_worker"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cluster.state_file: cannot use {path}: {error!r}; move it away to start afresh") from error


def save(path: Path, state: State) -> None:
    """Whoever reads the file sees the old state or the new one, whole.

    Raises:
        ConfigError: it cannot be written.
    """
    values = {
        "desired": {role.value: size for role, size in state.desired.items()},
        "cluster": state.cluster,
        "workers": {worker_id: role.value for worker_id, role in state.roles.items()},
        "retiring": sorted(state.retiring),
        "flip": {"worker": state.flip.worker_id, "role": state.flip.role.value} if state.flip else None,
        "gpus_per_worker": state.gpus_per_worker,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cluster.state_file: cannot write {path}: {error}") from error


def why_not(desired: Mapping[Role, int], config: Config) -> str:
    """The reason why pools of these sizes cannot serve; empty when they can."""
    prefill, decode = desired[Role.PREFILL], desired[Role.DECODE]
    if decode < 1 or prefill < 0 or prefill + decode > MAX_WORKERS:
        return f"there must be at least 1 decode worker, and at most {MAX_WORKERS} workers in all"
    if prefill < least(Role.PREFILL, config):
        return "router.mode is split, which needs at least one prefill worker; use --prefill 1"
    return ""


def least(role: Role, config: Config) -> int:
    """Workers that a pool needs for requests to be served."""
    return int(role is Role.DECODE or config.router.mode == "split")
