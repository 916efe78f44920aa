"""The environment of CUDA workers: what torch does by default at a broken communicator, and must not do here."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.config import Config, TestingConfig
from baton.config.testing import NCCL_MODES
from baton.errors import TransferError
from deploy.ray_pools.actor import worker_environment
from kvstore.transfer.transport.nccl_env import PINNED, require_environment
from kvstore.transfer.transport.nccl_log import carrier_since, length_of, nccl_log, private_log


def test_a_broken_pair_ends_no_process_and_no_watchdog_sleeps() -> None:
    environment = worker_environment(Config())
    switched_off = (
        "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING",
        "WAIT_TIMEOUT_DUMP_MILSEC",
    )  # fmt: skip
    assert {environment[f"TORCH_NCCL_{name}"] for name in switched_off} == {"0"}
    assert environment["TORCH_FR_BUFFER_SIZE"] == "0"
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"


@pytest.mark.parametrize("mode", NCCL_MODES)
def test_the_mode_of_the_transports_is_not_that_of_the_whole_process(mode: str) -> None:
    """The collectives of a tensor-parallel model run in the same process and in its children."""
    environment = worker_environment(dataclasses.replace(Config(), testing=TestingConfig(nccl_mode=mode)))
    assert [name for name in environment if "NONBLOCKING" in name] == []


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


KILLED = """
import os, signal, sys
from kvstore.transfer.transport.nccl_log import private_log
with private_log() as asked:
    print(asked["NCCL_DEBUG_FILE"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_worker_has_left_goes_when_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    left = Path(done.stdout.strip()).parent
    assert left.is_dir()
    assert left.is_relative_to(tmp_path)
    with private_log() as asked:
        assert not left.exists()
        assert list(tmp_path.iterdir()) == [Path(asked["NCCL_DEBUG_FILE"]).parent]


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
    assert worker_environment(Config()).items() >= PINNED.items()


def test_a_process_that_was_started_otherwise_makes_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    require_environment()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    with pytest.raises(TransferError, match="TORCH_DISTRIBUTED_DEBUG, CUDA_MODULE_LOADING must be set"):
        require_environment()
