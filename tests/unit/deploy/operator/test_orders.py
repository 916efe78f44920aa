"""Orders of an operator: those that would leave a pool without a worker are asked for twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import Conflict
from deploy.operator.orders import set_role, wake
from deploy.terminal import Terminal


class Client:
    """A client of a cluster whose workers have these roles and states."""

    def __init__(self, *workers: tuple[str, str, str]) -> None:
        self.workers = [dict(zip(("id", "role", "state"), worker, strict=True)) for worker in workers]
        self.ordered: list[tuple[str, str]] = []
        self.engine: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"workers": self.workers, "pools": {"prefill": {}, "decode": {"engine": self.engine}}}

    def set_role(self, worker_id: str, role: str) -> None:
        self.ordered.append((worker_id, role))


def order(client: Any, worker_id: str, role: str, *, is_forced: bool = False) -> None:
    set_role(client, Terminal(), worker_id, role, as_json=True, is_forced=is_forced)


def test_the_last_worker_of_a_pool_leaves_it_only_by_force() -> None:
    client = Client(("w0", "prefill", "ready"), ("w1", "decode", "ready"), ("w2", "prefill", "draining"))
    with pytest.raises(Conflict, match=r"w0 is the only prefill worker, .*`baton scale prefill 2`\), or set --force"):
        order(client, "w0", "decode")
    assert client.ordered == []
    order(client, "w0", "decode", is_forced=True)
    order(client, "w1", "decode")
    assert client.ordered == [("w0", "decode"), ("w1", "decode")]


def test_between_pools_of_different_engines_the_controller_says_why_not() -> None:
    """Another worker of the pool, or force, would not help."""
    client = Client(("w0", "prefill", "ready"))
    client.engine = ["tensor_parallel=2"]
    order(client, "w0", "decode")
    assert client.ordered == [("w0", "decode")]


def test_one_of_several_may_leave() -> None:
    client = Client(("w0", "prefill", "ready"), ("w1", "prefill", "ready"))
    order(client, "w0", "decode")
    assert client.ordered == [("w0", "decode")]


class Sleeping:
    """A client of a cluster whose model is ready after a few looks."""

    def __init__(self, *states: str) -> None:
        self.states = [*states]
        self.is_woken = False

    def wake(self) -> None:
        self.is_woken = True

    def status(self) -> dict[str, Any]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"models": [{"state": state}]}


def woken(client: Any, timeout_s: float, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    wake(client, Terminal(), "m", timeout_s=timeout_s, as_json=True)
    assert client.is_woken
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_is_woken_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    client = Sleeping("asleep", "waking", "ready")
    assert woken(client, 60.0, capsys)["state"] == "ready"
    assert client.states == ["ready"]
    assert woken(Sleeping("waking", "ready"), 0.0, capsys)["state"] == "waking", "without a wait"
    with pytest.raises(Conflict, match=r"not done within 0\.01 s \(m: down\)"):
        woken(Sleeping("down"), 0.01, capsys)
