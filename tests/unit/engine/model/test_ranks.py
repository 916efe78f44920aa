"""The group of a tensor-parallel model's ranks: how its collectives behave, whatever the process was started with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baton.config import EngineConfig, ModelConfig
from engine.model.ranks import OtherRanks
from tests.fakes.nccl import fake_nccl

BLOCKS = 1


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the group was made with, each time."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append({"to": backend, **options}))
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "")
    return made


def join(device: torch.device) -> None:
    cache: Any = SimpleNamespace(device=device)
    with contextlib.closing(OtherRanks(ModelConfig(), EngineConfig(), [cache])):
        pass


@pytest.mark.parametrize("said", [None, "0", "1"])
def test_collectives_block_whatever_the_environment_says(
    said: str | None, groups: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", said)
    with fake_nccl(monkeypatch):
        join(torch.device("cuda", 0))
    (group,) = groups
    assert group["to"] == "nccl"
    assert group["pg_options"].config.blocking == BLOCKS
    assert group["pg_options"]._timeout == group["timeout"], "torch warns otherwise"


def test_a_cpu_has_no_options_of_nccl(groups: list[dict[str, Any]]) -> None:
    join(torch.device("cpu"))
    (group,) = groups
    assert (group["to"], group["pg_options"], group["device_id"]) == ("gloo", None, None)
