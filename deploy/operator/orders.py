"""Commands that change a cluster, and wait until the change is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from baton.cluster import ModelState, with_role
from baton.errors import BatonError, Conflict, InvalidRequest
from deploy.operator.client import Client
from deploy.say import say

POLL_S = 0.1


def scale(
    client: Client,
    console: Console,
    pool: str,
    num_workers: int,
    *,
    timeout_s: float,
    as_json: bool,
    is_forced: bool = False,
) -> None:
    """Set a pool's size, and wait until the pool has reached it.

    Args:
        client: client of a router.
        console: shows the progress.
        pool: prefill or decode.
        num_workers: new size.
        timeout_s: maximum wait; 0: do not wait.
        as_json: print the result as one JSON document.
        is_forced: accept the size even if the workers would not fit on the one machine that runs them all.

    Raises:
        Conflict: the workers do not fit, or the timeout expired.
    """
    began_s = time.monotonic()
    client.scale(pool, num_workers, is_forced)

    def progress(status: dict[str, Any]) -> tuple[bool, str]:
        found = status["pools"][pool]
        states = [worker["state"] for worker in status["workers"] if worker["role"] == pool]
        leaving = states.count("draining")
        done = found["desired"] == found["ready"] == num_workers and not leaving
        return done, f"{pool}: {found['ready']} of {num_workers} ready" + (f", {leaving} leaving" if leaving else "")

    if timeout_s:
        _wait(client, console, progress, timeout_s)
    found = client.status()["pools"][pool]
    # Routers receive an order a moment later, so their desired size may still be the old one.
    _report(
        {"pool": pool, "desired": num_workers, "ready": found["ready"], "seconds": _since(began_s)},
        f"{pool}: {found['ready']} of {num_workers} ready, after {_since(began_s):.1f} s",
        as_json,
    )


def drain(client: Client, console: Console, worker_id: str, timeout_s: float, as_json: bool) -> None:
    """Drain a worker, and wait until it is gone. Raises Conflict if that takes longer than `timeout_s`."""
    began_s = time.monotonic()
    before = _find(client.status(), worker_id)
    label = with_role(worker_id, before["role"] if before else "")
    client.drain(worker_id)

    def progress(status: dict[str, Any]) -> tuple[bool, str]:
        worker = _find(status, worker_id)
        is_gone = worker is None or (before is not None and worker["pid"] != before["pid"])
        return is_gone, f"{label}: {worker['state'] if worker else 'gone'}"

    _wait(client, console, progress, timeout_s)
    _report(
        {"worker": worker_id, "seconds": _since(began_s)},
        f"{label} is gone, after {_since(began_s):.1f} s",
        as_json,
    )


def set_role(
    client: Client, console: Console, worker_id: str, role: str, as_json: bool, *, is_forced: bool = False
) -> None:
    """Move a worker to the other pool.

    Args:
        is_forced: allow the last ready worker of a pool to leave it.

    Raises:
        Conflict: it is the last one.
    """
    began_s = time.monotonic()
    status = client.status()
    of_role = [worker for worker in status["workers"] if worker["role"] != role and worker["state"] == "ready"]
    has_equal_engines = not any(pool.get("engine") for pool in status["pools"].values())  # else it is refused anyway
    if not is_forced and has_equal_engines and [worker["id"] for worker in of_role] == [worker_id]:
        pool = of_role[0]["role"]
        raise Conflict(
            f"{worker_id} is the only {pool} worker, so its pool would be empty; start another one first (`baton scale "
            f"{pool} 2`), or set --force"
        )
    client.set_role(worker_id, role)
    _report(
        {"worker": worker_id, "role": role, "seconds": _since(began_s)},
        f"{worker_id} is a {role} worker, after {_since(began_s):.1f} s",
        as_json,
    )


def wake(client: Client, console: Console, model: str, *, timeout_s: float, as_json: bool) -> None:
    """Wake a model, and wait until it is ready.

    Args:
        client: client of a router, for this model.
        console: shows the progress.
        model: name of the model, as the operator gave it.
        timeout_s: maximum wait; 0: do not wait.
        as_json: print the result as one JSON document.

    Raises:
        Conflict: the timeout expired.
    """
    began_s = time.monotonic()
    client.wake()

    def progress(status: dict[str, Any]) -> tuple[bool, str]:
        states = sorted({each["state"] for each in status["models"]})
        return states == [ModelState.READY.value], f"{model}: {', '.join(states) or 'not known'}"

    if timeout_s:
        _wait(client, console, progress, timeout_s)
    _, sentence = progress(client.status())
    state = sentence.removeprefix(f"{model}: ")
    _report(
        {"model": model, "state": state, "seconds": _since(began_s)},
        f"{sentence}, after {_since(began_s):.1f} s",
        as_json,
    )


def _wait(
    client: Client, console: Console, progress: Callable[[dict[str, Any]], tuple[bool, str]], timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    with console.status("") as shown:
        while True:
            try:
                is_done, sentence = progress(client.status())
            except InvalidRequest:
                raise
            except BatonError as error:  # the router may be restarting
                is_done, sentence = False, str(error)
            if is_done:
                return
            if time.monotonic() > deadline:
                raise Conflict(
                    f"not done within {timeout_s:g} s ({sentence}); it continues, `baton status` shows the progress"
                )
            shown.update(Text(sentence))
            time.sleep(POLL_S)


def _find(status: dict[str, Any], worker_id: str) -> dict[str, Any] | None:
    return next((worker for worker in status["workers"] if worker["id"] == worker_id), None)


def _report(values: dict[str, Any], sentence: str, as_json: bool) -> None:
    say(json.dumps(values) if as_json else sentence)


def _since(began_s: float) -> float:
    return round(time.monotonic() - began_s, 3)
