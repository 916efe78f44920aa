"""The host's process: what it is started with, how it ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from baton.config import Config, RouterConfig
from baton.errors import ConfigError, ModelLoadError
from engine.vllm import process
from engine.vllm.messages import Abort, Message, Ping, Pong, Start, Stepped
from engine.vllm.process import HostProcess
from tests.support.fake_vllm.environment import TORCH, VERSION, behave, fake_vllm, reported_by
from tests.support.waiting import wait_until
from tests.unit.engine.vllm.hosts import Hosts, host_of, nothing_is_left

ARGUMENTS: dict[str, Any] = {
    "model": "/models/m",
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 33,
    "max_model_len": -1,
    "tensor_parallel_size": 1,
}
START = Start(ARGUMENTS, [0], {})


def started(folder: Path, start: Start = START, **behaviour: Any) -> HostProcess:
    return HostProcess.start(fake_vllm(folder, **behaviour), start, folder / "cache", 1)


# -- what it is started with -------------------------------------------------------------------------------------------


def test_worker_and_host_have_different_versions_of_torch(hosts: Hosts) -> None:
    engine = hosts.engine()
    report = reported_by(hosts.python)
    assert engine.computes.attention == f"arithmetic+torch:{TORCH}"
    assert torch.__version__ != TORCH
    assert report["found"] == {"torch": str(next(Path(hosts.python).parents[1].glob("lib/*/*/torch.py")))}
    assert engine.name == f"vllm/{VERSION}"


def test_the_host_finds_batons_packages_and_no_other_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not find them even if the worker's PYTHONPATH names their folder."""
    ours = Path(psutil.__file__).parents[1]
    assert (ours / "pydantic").is_dir()
    monkeypatch.setenv("PYTHONPATH", str(ours))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    host = started(tmp_path)
    report = reported_by(str(tmp_path / "vllm/bin/python"))
    try:
        assert report["found"].keys() == {"torch"}
        heavy = {"numpy", "torch", "pydantic", "asyncio"}
        assert not heavy & set(report["modules"]), "a host imports vLLM's torch, and nothing before"
        packages = Path(report["environment"]["PYTHONPATH"])
        assert sorted(each.name for each in packages.iterdir()) == ["baton", "engine"]
        assert not {"PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"} & report["environment"].keys()
    finally:
        host.close()


def test_no_secret_of_the_worker_reaches_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ROUTER_CACHE_SECRET", "a secret")
    monkeypatch.setenv("BATON_CONFIG_JSON", '{"cluster": "another secret"}')
    monkeypatch.setenv("HF_TOKEN", "another secret")
    monkeypatch.setenv("SOMETHING_OF_VLLMS", "kept")
    host = started(tmp_path)
    host.close()
    environment = reported_by(str(tmp_path / "vllm/bin/python"))["environment"]
    assert not [value for value in environment.values() if "a secret" in value or "other secret" in value]
    assert "HF_TOKEN" not in environment
    assert [name for name in environment if name.startswith("BATON_")] == ["BATON_VLLM_SAMPLER"]
    assert environment["SOMETHING_OF_VLLMS"] == "kept"


def test_the_host_has_its_variables_and_the_operators_where_they_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    host = HostProcess.start(fake_vllm(tmp_path), START, tmp_path / "cache", 3)
    host.close()
    environment = reported_by(str(tmp_path / "vllm/bin/python"))["environment"]
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "Baton needs it so"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CACHE_ROOT"] == str(tmp_path / "cache" / "vllm")
    assert environment["BATON_VLLM_SAMPLER"].startswith('["/models/m", [0], ')


def test_the_host_inherits_the_connection_and_the_memory_alone(tmp_path: Path) -> None:
    with (tmp_path / "another file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        host = started(tmp_path)
    report = reported_by(str(tmp_path / "vllm/bin/python"))
    found = {link for number, link in report["descriptors"].items() if int(number) > 2 and link[0] != "/"}
    memory = {link for link in found if link.startswith("memfd:") or "memfd:baton-vllm-kv" in link}
    files = [link for number, link in report["descriptors"].items() if int(number) > 2]
    assert str(tmp_path / "another file") not in files
    assert report["descriptors"]["0"] == "/dev/null"
    assert len(memory) + len([link for link in files if "memfd:baton-vllm-kv" in link and link[0] == "/"]) == 1
    assert len([link for link in files if link.startswith("socket:")]) == 1, "the connection"
    host.close()


def test_the_host_gets_the_settings(hosts: Hosts) -> None:
    engine = hosts.engine(num_blocks=20, max_num_seqs=3, vllm_args={"enforce_eager": True})
    report = reported_by(hosts.python)
    asked = report["arguments"] | report["cpu_arguments"]
    assert asked["enforce_eager"] is True
    assert (asked["num_gpu_blocks_override"], asked["max_num_seqs"], asked["block_size"]) == (21, 3, 32)
    assert report["eos_token_ids"] == [0]
    assert (engine.num_blocks, engine.max_model_len, engine.vocab_size) == ((21,), 20 * 32, 49152)


# -- how it starts, or does not ----------------------------------------------------------------------------------------


def test_what_vllm_raises_at_its_start_is_shown_and_nothing_is_left(tmp_path: Path) -> None:
    with nothing_is_left() as check:
        with pytest.raises(ModelLoadError) as refused:
            started(tmp_path, fails="raises")
        assert str(refused.value) == "vLLM cannot run this model: ValueError: there is no such architecture"
        del refused
        check()


def test_of_a_validation_the_reasons_are_shown_without_what_was_validated(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as refused:
        started(tmp_path, fails="validates")
    assert str(refused.value) == (
        "vLLM cannot run this model: Invalid: Value error, it is too long; Input should be a boolean"
    )


def test_a_host_that_ends_at_its_start_is_named_with_its_status(tmp_path: Path) -> None:
    with nothing_is_left() as check:
        with pytest.raises(ModelLoadError, match="vLLM's process has ended with status 7 while it started"):
            started(tmp_path, fails="exits")
        check()


def test_a_host_that_sends_no_message_at_its_start_is_refused(tmp_path: Path) -> None:
    with nothing_is_left() as check:
        with pytest.raises(ModelLoadError, match=r"process cannot be understood: .* is not a message") as refused:
            started(tmp_path, fails="babbles")
        del refused
        check()


@pytest.mark.parametrize("num_bytes", [10, 1 << 22], ids=["small", "larger than the sockets' buffer"])
def test_a_host_that_ends_before_it_was_sent_anything_is_named_too(tmp_path: Path, num_bytes: int) -> None:
    """It may end while the worker still writes to it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 5\n")
    python.chmod(0o755)
    start = START._replace(arguments=ARGUMENTS | {"hf_overrides": "x" * num_bytes})
    with nothing_is_left() as check:
        with pytest.raises(ModelLoadError, match="vLLM's process has ended with status 5 while it started"):
            HostProcess.start(str(python), start, tmp_path, 1)
        check()


def test_an_interpreter_that_cannot_be_run_is_named_with_the_shells_status(tmp_path: Path) -> None:
    with nothing_is_left() as check:
        with pytest.raises(ModelLoadError, match="has ended with status 127 while it started"):
            HostProcess.start(str(tmp_path / "python"), START, tmp_path, 1)
        check()


def test_an_engine_that_cannot_be_built_ends_its_host(hosts: Hosts) -> None:
    config = hosts.config({"layout": "swapped"})
    with nothing_is_left() as check:
        with pytest.raises(ModelLoadError, match="is not laid out as vLLM declares"):
            hosts.started(config)
        check()
        behave(hosts.python, ready={"device": "NVIDIA H200"})
        with pytest.raises(
            ConfigError, match=r"model.device is cpu, but the vLLM of engine.vllm_python computes on GPUs"
        ):
            hosts.started(on_device(config, "cpu"))
        check()


def on_device(config: Config, device: str) -> Config:
    return replace(config, model=replace(config.model, device=device))


def test_a_worker_that_exchanges_no_kv_does_not_start_in_mode_disaggregated(hosts: Hosts) -> None:
    """It could serve nothing."""
    config = hosts.config({"ready": {"memory": None, "why_not_shared": "it has several kinds of layers"}})
    with nothing_is_left() as check:
        with pytest.raises(
            ConfigError, match="but this worker's vLLM exchanges no KV: it has several kinds"
        ) as refused:
            hosts.started(replace(config, router=RouterConfig(mode="disaggregated")))
        del refused
        check()
    assert hosts.started(config).computes.fallbacks, "it serves otherwise, and says so"


def test_a_gpu_that_is_asked_for_must_be_there(hosts: Hosts) -> None:
    config = on_device(hosts.config(), "cuda")
    with pytest.raises(
        ModelLoadError, match=r"model.device is cuda, but the vLLM of engine.vllm_python computes on CPUs"
    ):
        hosts.started(config)


# -- how it ends -------------------------------------------------------------------------------------------------------


async def test_it_answers_between_steps_and_reports_what_commands_have_changed(tmp_path: Path) -> None:
    host = started(tmp_path)
    try:
        async with asyncio.timeout(30), host.connected():
            host.send(Ping())
            host.send(Abort(3))
            received: list[Message] = [await host.receive()]
            while not isinstance(received[-1], Stepped):
                received.append(await host.receive())
            assert received[0] == Pong()
            assert received[-1].counts.num_free == 32
    finally:
        host.close()


async def test_nothing_is_left_of_a_host_that_has_worked(tmp_path: Path) -> None:
    with nothing_is_left() as check:
        host = started(tmp_path)
        (pid,) = {host.pid}
        async with host.connected():
            host.send(Ping())
            await asyncio.wait_for(host.receive(), 30)
        host.close()
        await asyncio.sleep(0)  # the transport closes its socket
        assert not psutil.pid_exists(pid)
        assert host.why_ended() == "its process has ended with status 0"
        check()


async def test_nothing_is_left_of_an_engine(hosts: Hosts) -> None:
    subject = hosts.subject()
    hosts.close()
    del subject
    config = hosts.config()
    with nothing_is_left() as check:
        engine = hosts.started(config)
        running = asyncio.create_task(engine.run())
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait((running,))
        hosts.close()
        del engine, running
        await asyncio.sleep(0)
        check()


def test_a_host_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)
    with nothing_is_left() as check:
        host = started(tmp_path)
        os.kill(host.pid, signal.SIGSTOP)
        assert host.why_ended() == "its connection is closed"
        host.close()
        assert host.why_ended() == "its process has ended with status -9"
        check()


def test_a_host_ends_with_its_worker_even_if_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its folder ends when the next host starts."""
    python = fake_vllm(tmp_path)
    code = f"""
        import os, signal, time
        from pathlib import Path
        from engine.vllm.messages import Start
        from engine.vllm.process import HostProcess
        host = HostProcess.start({python!r}, Start({ARGUMENTS!r}, [0], {{}}), Path({str(tmp_path)!r}), 1)
        os.kill(host.pid, signal.SIGSTOP)
        print(host.pid, flush=True)
        time.sleep(600)
    """
    root = str(Path(process.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    )
    with worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        host = psutil.Process(pid)
        worker.kill()
        wait_until(lambda: not host.is_running() or host.status() == psutil.STATUS_ZOMBIE, 30.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(list(tmp_path.glob("baton-*"))) == 1
    started(tmp_path / "next").close()
    assert list(tmp_path.glob("baton-*")) == []


def test_the_process_that_is_watched_is_the_host_itself(hosts: Hosts) -> None:
    """The wrapper script executes the host in its own process, so that a signal reaches the host."""
    engine = hosts.engine()
    assert host_of(engine).pid == reported_by(hosts.python)["pid"]
    assert host_of(engine).ppid() == os.getpid()
