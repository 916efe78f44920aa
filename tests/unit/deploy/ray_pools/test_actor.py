"""What keeps a worker's process gives it what is its node's, and reports why it does not start."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest

from baton.cluster import Role
from baton.config import ClusterConfig, Config, IndexConfig, TelemetryConfig, TestingConfig, process_config
from baton.errors import ConfigError, WorkerFailed
from baton.trust import KeyFile, Principal, draw_secret, write_private
from deploy.ray_pools import actor, turns
from deploy.ray_pools.actor import WorkerActor, own_redis_url, own_secret
from deploy.ray_pools.node import SOCKET
from tests.support.waiting import wait_until
from tests.unit.deploy.ray_pools.test_node import PATIENT_S, node
from worker.log import written


class Alone(WorkerActor):
    """It has the whole node."""

    def _share(self, config: Config) -> float:
        return 1.0


async def test_why_a_worker_does_not_start_is_in_its_container_s_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the worker's own words, and how it ended, beside what the controller hears: here, of another secret."""
    for name in ("ours", "theirs"):
        write_private(tmp_path / name, draw_secret())
    fingerprint = KeyFile(tmp_path / "ours", Principal.CONTROLLER).keys.fingerprint
    config = Config(
        testing=TestingConfig(arithmetic=True),
        cluster=ClusterConfig(secret=str(tmp_path / "theirs")),
        telemetry=TelemetryConfig(log_format="json"),
    )
    with node(tmp_path) as here:
        monkeypatch.setenv(SOCKET, str(here.folder / "socket"))
        worker = Alone("decode", "worker-0", "127.0.0.1", config.to_json(), fingerprint, pool="prefill")
        assert await worker.pool() == "prefill", "it has changed its role before"
        others = r"theirs on .* are not those of this cluster's controller: cluster\.secret"
        with pytest.raises(ConfigError, match=others):
            await worker.start()
        with pytest.raises(ConfigError):
            await worker.ended()
        assert worker._ended is not None
        await worker._ended
        here.wait_for("no worker")
        lines = [json.loads(line) for line in here.end().splitlines()]
    of_worker = [line["message"] for line in lines if line.get("worker") == "worker-0"]
    assert of_worker[0] == "worker-0 starts: it is a decode worker"
    assert "worker-0 ended with status 1" in of_worker
    assert any(re.search(others, message) for message in of_worker)


def test_a_worker_asks_redis_as_the_user_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray passes on is the controller's, without its password."""
    given = Config(index=IndexConfig(redis_url="redis://controller:word@redis:6379/0")).for_pool(Role.DECODE)
    own = "redis://worker:other@redis:6379/0"
    url = own_redis_url(given, {"BATON_INDEX_REDIS_URL": own})
    assert url == "redis://worker:***@redis:6379/0"
    config = dataclasses.replace(given, index=dataclasses.replace(given.index, redis_url=url))
    monkeypatch.setenv("BATON_CONFIG_JSON", config.to_json())
    monkeypatch.setenv("BATON_INDEX_REDIS_URL", own)
    assert process_config().index.url == own
    assert own_redis_url(given, {}) == given.index.redis_url


def test_a_worker_has_the_keys_of_its_own_node() -> None:
    """A pod's lie where its own container has put them; elsewhere they are at the same path on every machine."""
    given = Config(cluster=ClusterConfig(secret="/run/keys"))
    assert own_secret(given, {}) == "/run/keys"
    assert own_secret(given, {"BATON_CLUSTER_SECRET": "/node/keys"}) == "/node/keys"


async def test_a_worker_that_dies_at_its_start_leaves_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's file for the output of the actor takes the worker's as well."""
    log, found = tmp_path / "worker.err", os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: str(log) if path == "/proc/self/fd/2" else found(path))
    monkeypatch.setattr(actor, "module_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    log.write_text("Traceback (most recent call last):\nIllegalInstruction: amx\n")
    with pytest.raises(WorkerFailed) as error:
        await Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode").start()
    assert str(error.value) == f"worker-0 ended before it was ready: IllegalInstruction: amx; its log: {log}"
    log.unlink()
    with pytest.raises(WorkerFailed, match="worker-0 ended before it was ready; its log says why"):
        await Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode").start()


async def test_a_worker_knows_what_takes_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket of its node's first process, else the file that Ray has for its actor; both streams go there."""
    log, found, commands = tmp_path / "worker.err", os.path.realpath, list[tuple[str, ...]]()
    log.touch()
    code = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n'); raise SystemExit(3)"

    def command(*arguments: str) -> list[str]:
        commands.append(arguments)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(os.path, "realpath", lambda path: str(log) if path == "/proc/self/fd/2" else found(path))
    monkeypatch.setattr(actor, "module_command", command)
    with log.open("a") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            alone = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode")
            with pytest.raises(WorkerFailed):
                await alone.start()
            assert alone._ended is not None
            assert await alone._ended == 3
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    assert commands[-1][-2:] == ("--output", str(log))
    assert written(log, "worker-0") == ["out", "err"]
    with node(tmp_path) as here:
        monkeypatch.setenv(SOCKET, str(here.folder / "socket"))
        worker = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode")
        with pytest.raises(WorkerFailed):
            await worker.start()
        assert worker._ended is not None
        assert await worker._ended == 3
        wait_until(lambda: written(here.folder / "socket", "worker-0") == ["out", "err"], PATIENT_S)
        assert commands[-1][-2:] == ("--output", str(here.folder / "socket"))


def on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> list[Alone]:
    """Actors of workers on one node, whose processes end at once."""
    monkeypatch.setattr(actor, "folder_of", lambda node_id: tmp_path / "turns" / node_id)
    monkeypatch.setattr(actor, "_node_id", lambda: "a-node")
    monkeypatch.setattr(actor, "module_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    return [Alone("decode", f"worker-{each}", "127.0.0.1", Config().to_json(), pool="decode") for each in range(number)]


async def begin(*workers: Alone) -> None:
    """Their turns end."""
    for each in workers:
        with pytest.raises(WorkerFailed):
            await each.start()
    await asyncio.sleep(0.01)


async def test_on_a_node_as_many_workers_as_allowed_load_their_models_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = on_a_node(tmp_path, monkeypatch, 3)
    for each in workers[:2]:
        await asyncio.wait_for(each.turn(2), 5)
        await asyncio.wait_for(each.turn(2), 5)  # asked again, by the next controller
    third = asyncio.create_task(workers[2].turn(2))
    await asyncio.sleep(2 * turns.POLL_S)
    assert not third.done()
    await begin(workers[0])
    await asyncio.wait_for(third, 5)
    await asyncio.wait_for(workers[0].turn(2), 5)  # it has begun: there is nothing to wait for
    await begin(*workers[1:])


async def test_a_worker_that_starts_without_its_turn_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller of the release before asks for none. A turn that comes too late is given back."""
    first, late, last = on_a_node(tmp_path, monkeypatch, 3)
    await first.turn(1)
    waiting = asyncio.create_task(late.turn(1))
    await asyncio.sleep(turns.POLL_S)
    await begin(late, first)
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(last.turn(1), 5)
    await begin(last)


async def test_where_a_node_has_no_folder_for_turns_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = on_a_node(tmp_path, monkeypatch, 2)
    (tmp_path / "turns").touch()
    await asyncio.wait_for(first.turn(1), 5)
    await asyncio.wait_for(second.turn(1), 5)
    assert "worker-1 does not wait for its turn to load its model" in caplog.text
