"""What keeps a worker's process gives it what is its node's, and reports why it does not start."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.cluster import Role
from baton.config import ClusterConfig, Config, IndexConfig, TelemetryConfig, TestingConfig, process_config
from baton.errors import ConfigError, WorkerFailed
from baton.own_folder import LOCK
from baton.trust import KeyFile, Principal, draw_secret, write_private
from deploy.processes import module_command
from deploy.ray_pools import actor, turns
from deploy.ray_pools.actor import own_redis_url, own_secret
from deploy.ray_pools.node import SOCKET
from deploy.ray_pools.node_link import WorkerEnd
from tests.support.node_process import Alone, let_go, node
from worker.log import NodeProcess, written


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
        await here.wait_for("no worker")
        await let_go(worker)
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
    """The error names the file to which the node process writes, if there is one."""
    code = "import sys; print('Traceback (most recent call last):'); sys.exit('IllegalInstruction: amx')"
    monkeypatch.setattr(actor, "module_command", lambda *_: [sys.executable, "-c", code])
    with node(tmp_path) as here:
        monkeypatch.setenv(SOCKET, str(here.socket))
        worker = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode")
        with pytest.raises(WorkerFailed) as error:
            await worker.start()
        assert str(error.value) == "worker-0 ended before it was ready: IllegalInstruction: amx"
        await let_go(worker)
    log = str(tmp_path / "workers.log")
    assert WorkerEnd(1, "of memory", log).last_words == f": of memory; its log: {log}"
    assert WorkerEnd(0, "", log).in_words == "ended with status 0"


async def test_a_worker_knows_its_node_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has its output, of both streams."""
    code = "import os, sys; os.write(1, b'out\\n'); os.write(2, b'err\\n'); print(sys.argv[1:]); raise SystemExit(3)"

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-c", code, *arguments]

    monkeypatch.setattr(actor, "module_command", command)
    with node(tmp_path) as here:
        monkeypatch.setenv(SOCKET, str(here.socket))
        worker = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode")
        with pytest.raises(WorkerFailed):
            await worker.start()
        *streams, arguments = written(NodeProcess(here.socket, "baton"), "worker-0")
        await let_go(worker)
    assert streams == ["out", "err"]
    assert arguments.startswith(
        f"['worker', 'decode', 'worker-0', '127.0.0.1', '--node', '{here.socket}', '--cluster', 'baton', "
    )


@pytest.mark.parametrize("is_long", [False, True], ids=["a short path", "a path too long for a socket"])
async def test_without_a_node_process_an_actor_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """It ends with the actor, and nothing can adopt its worker later."""
    monkeypatch.delenv(SOCKET, raising=False)
    if is_long:
        temporary = tmp_path / ("x" * 100)
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    report = {"pid": 1, "address": "127.0.0.1:1", "incarnation": "a1"}
    code = f"import os, sys, time; os.write(int(sys.argv[-1]), b'{json.dumps(report)}\\n'); time.sleep(600)"
    found = module_command

    def command(module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-c", code] if module == "worker" else found(module, *arguments)

    monkeypatch.setattr(actor, "module_command", command)
    worker = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode")
    again = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode", adopts=True)
    try:
        assert await worker.start() == report | {"pod": ""}
        assert worker._own is not None
        (process,) = psutil.Process(worker._own.pid).children()
        arguments = worker._own.args
        assert isinstance(arguments, list)
        folder = Path(arguments[arguments.index("--folder") + 1])
        assert len(str(folder / "socket")) < 108
        assert (folder.parent / LOCK).exists(), "the next process could not remove the folder after a kill"
        await asyncio.wait_for(worker.kill(), 20)
        assert not process.is_running()
        with pytest.raises(WorkerFailed, match="worker-0 was killed by SIGKILL"):
            await worker.ended()
        with pytest.raises(WorkerFailed, match="worker-0 has ended with its actor: its Ray node has no node process"):
            await again.start()
    finally:
        await let_go(worker, again)
        worker._stack.close()


@pytest.fixture
def a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whose process the actors of the test find."""
    with node(tmp_path) as here:
        monkeypatch.setenv(SOCKET, str(here.socket))
        yield


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
    await let_go(*workers)
    await asyncio.sleep(0.01)


@pytest.mark.usefixtures("a_node")
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


@pytest.mark.usefixtures("a_node")
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


@pytest.mark.usefixtures("a_node")
async def test_the_folders_of_nodes_that_are_gone_do_not_stay_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = on_a_node(tmp_path, monkeypatch, 1)
    for name, age_s in (("gone", 2 * turns.KEPT_S), ("a-node", 2 * turns.KEPT_S), ("other", 0.0)):
        folder = tmp_path / "turns" / name
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    await worker.turn(1)
    assert sorted(each.name for each in (tmp_path / "turns").iterdir()) == ["a-node", "other"]
    await begin(worker)


async def test_where_a_node_has_no_folder_for_turns_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = on_a_node(tmp_path, monkeypatch, 2)
    (tmp_path / "turns").touch()
    await asyncio.wait_for(first.turn(1), 5)
    await asyncio.wait_for(second.turn(1), 5)
    assert "worker-1 does not wait for its turn to load its model" in caplog.text
