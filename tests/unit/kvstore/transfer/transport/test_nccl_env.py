"""The environment of CUDA workers: what torch does by default at a broken communicator, and must not do here."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from baton.config import Config, TransferConfig
from baton.errors import TransferError
from deploy.ray_pools.actor import worker_environment
from kvstore.transfer.transport.nccl_env import PINNED, nccl_environment, require_environment
from kvstore.transfer.transport.nccl_log import carrier_since, length_of, nccl_log, private_log


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


def test_nccl_logs_what_moves_the_bytes_unless_its_user_wants_another_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    with private_log() as asked, private_log() as by_another:
        assert asked["NCCL_DEBUG"] == "INFO"
        folder = Path(asked["NCCL_DEBUG_FILE"]).parent
        assert folder != Path(by_another["NCCL_DEBUG_FILE"]).parent, "nobody knows the name before"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / f"{os.getpid()}.log").write_text("NCCL's")
    assert not folder.exists()
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    with private_log() as asked:
        assert asked == {}


def test_what_moves_the_bytes_is_read_from_what_was_logged_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl-%p.log"))
    log = nccl_log()
    assert log == tmp_path / f"nccl-{os.getpid()}.log"
    assert (length_of(log), carrier_since(log, 0)) == (0, "unknown"), "NCCL has not begun it"
    text = "n:1:2 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] {}\n"
    starts = []
    for words in ("via P2P/CUMEM/read", "[send] via NET/IB/0/GDRDMA", "[receive] via NET/Socket/0", "via SHM/direct"):
        starts.append(length_of(log))
        log.write_text((log.read_text() if log.exists() else "") + text.format(words))
    assert [carrier_since(log, start) for start in reversed(starts)] == ["SHM"] * 4
    assert [_only(line, tmp_path) for line in log.read_text().splitlines()] == [
        "P2P", "NET/IB", "NET/Socket", "SHM"
    ]  # fmt: skip
    assert carrier_since(log, length_of(log)) == "unknown"
    monkeypatch.delenv("NCCL_DEBUG_FILE")
    assert nccl_log() is None
    assert carrier_since(None, 0) == "unknown"


def _only(line: str, folder: Path) -> str:
    (folder / "line").write_text(line)
    return carrier_since(folder / "line", 0)


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
