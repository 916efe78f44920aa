"""The environment of CUDA workers: what torch does by default at a broken communicator, and must not do here."""

from __future__ import annotations

import dataclasses

import pytest

from baton.config import Config, TransferConfig
from baton.errors import TransferError
from deploy.ray_pools.actor import worker_environment
from kvstore.transfer.transport.nccl_env import PINNED, nccl_environment, require_environment


def test_a_broken_pair_ends_no_process_and_no_watchdog_sleeps() -> None:
    environment = nccl_environment(TransferConfig())
    switched_off = (
        "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING",
        "WAIT_TIMEOUT_DUMP_MILSEC",
    )  # fmt: skip
    assert {environment[f"TORCH_NCCL_{name}"] for name in switched_off} == {"0"}
    assert environment["TORCH_FR_BUFFER_SIZE"] == "0"
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"


def test_what_depends_on_the_settings_is_of_the_settings() -> None:
    config = TransferConfig(op_timeout_s=3.5, nccl_mode="blocking-lazy")
    environment = nccl_environment(config)
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "4", "of whole seconds, and never shorter"
    assert environment["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "0"
    assert nccl_environment(TransferConfig())["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"


def test_workers_run_in_it_whatever_their_surroundings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    config = dataclasses.replace(Config(), transfer=TransferConfig(op_timeout_s=20.0))
    environment = worker_environment(config)
    assert environment.items() >= nccl_environment(config.transfer).items()


def test_a_process_that_was_started_otherwise_makes_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    require_environment()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    with pytest.raises(TransferError, match="TORCH_DISTRIBUTED_DEBUG, CUDA_MODULE_LOADING must be set"):
        require_environment()
