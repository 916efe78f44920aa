"""What `baton up` does around its children, with children of a line or two."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from rich.console import Console

from baton.blocks import content_id
from baton.cluster import Role, RoutedModel, RouterInfo
from baton.config import AutoscaleConfig, ClusterConfig, Config, IndexConfig, RouterConfig, TelemetryConfig
from baton.errors import ConfigError, WorkerFailed
from baton.own_folder import own_folder
from baton.trust import Principal, draw_secret, write_private
from deploy.controller.state import ControllerState, save
from deploy.local import child as children
from deploy.local import up
from deploy.local.child import Child
from deploy.local.keys import member_files
from deploy.local.ray_cluster import RayCluster, rays_folder
from deploy.processes import FENCED, UNJOINED
from deploy.ray_pools import actor as actors
from deploy.ray_pools.actors import RayActors
from deploy.ray_pools.node import SOCKET
from tests.integration.cluster import free_port
from tests.support.node_process import REPORT, Alone, let_go, node


def child(folder: Path, code: str, *, awaits_line: bool = False) -> Child:
    (folder / "told.py").write_text(f"import json, os, sys, time\nfrom pathlib import Path\n{code}")
    return Child("told", "told", (), {"PYTHONPATH": str(folder)}, awaits_line=awaits_line)


def ray_of(config: Config, folder: Path, keys: Mapping[Principal, Path] = MappingProxyType({})) -> RayCluster:
    return RayCluster([config], [folder / "state.json"], keys)


def joining(**settings: float) -> Config:
    return Config(cluster=ClusterConfig(ray_address="127.0.0.1:1", **settings))  # type: ignore[arg-type]


async def test_the_wait_before_a_restart_has_a_limit_however_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MAX_RESTART_S", 0.01)
    failing = Child("x", "x", (), {})
    failing._began_s, failing._num_failures = time.monotonic(), 5000
    async with asyncio.timeout(20):
        await failing.pause("ended")


def test_ray_of_our_own_asks_for_a_token_that_is_new(tmp_path: Path) -> None:
    keys = member_files("", tmp_path).files
    environments = [ray_of(Config(), tmp_path, keys)._environment for _ in range(2)]
    assert {each["RAY_AUTH_MODE"] for each in environments} == {"token"}
    assert len({each["RAY_AUTH_TOKEN"] for each in environments}) == 2
    assert all(len(each["RAY_AUTH_TOKEN"]) == 64 for each in environments)
    assert environments[0]["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "it listens on loopback alone"
    assert ray_of(joining(), tmp_path)._environment == {}, "another Ray has a token of its own"


@pytest.mark.parametrize("depth", [0, 60])
def test_ray_has_a_folder_that_nobody_else_gets_into(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary + depth * "x")
        with rays_folder(tmp_path) as rays:
            ray = RayCluster([Config()], [tmp_path / "state.json"], member_files("", tmp_path).files, None, rays)
            assert ray._head._command[-2:] == ["--folder", str(rays)]
            outer = rays.parent
            assert stat.S_IMODE(outer.stat().st_mode) == 0o700
            assert str(outer.parent) == (temporary if depth == 0 else "/tmp"), "names of sockets have to be short"
            assert (tmp_path / "ray").readlink() == rays / "session_latest" / "logs"
        assert outer.exists(), "its logs say why it ended"
        with own_folder(outer.parent):
            assert not outer.exists()


@pytest.mark.parametrize(("was_started", "num_ends"), [(True, 1), (False, 0)])
async def test_workers_of_a_controller_that_could_not_come_back_are_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, was_started: bool, num_ends: int
) -> None:
    """One that could never join has none."""
    code = f"if '--end' in sys.argv: Path({str(tmp_path / 'ends')!r}).open('a').write('x')\nsys.exit({UNJOINED})"
    ray = ray_of(joining(stop_timeout_s=10), tmp_path)
    (controller,) = ray._controllers
    controller._child, controller._was_started = child(tmp_path, code), was_started
    await controller._child.start()
    await controller._child.ended()
    await ray.stop()
    ends = tmp_path / "ends"
    assert (len(ends.read_text()) if ends.exists() else 0) == num_ends
    assert ("workers may still run in the Ray cluster at 127.0.0.1:1" in caplog.text) == was_started


async def test_a_ray_that_hangs_at_its_restart_is_started_once_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "RESTART_S", 0.01)
    been = tmp_path / "been"
    code = (
        f"if not Path({str(been)!r}).exists():\n    Path({str(been)!r}).touch(); time.sleep(60)\n"
        "os.write(int(sys.argv[-1]), json.dumps({'address': '127.0.0.1:7'}).encode() + b'\\n')"
    )
    config = Config(cluster=ClusterConfig(start_timeout_s=1.0))
    ray = ray_of(config, tmp_path, member_files("", tmp_path).files)
    ray._head = child(tmp_path, code)
    await asyncio.wait_for(ray._restart_head(1), 20)
    await ray._head.ended()
    assert "has not started within 1 s" in caplog.text


async def test_the_controller_is_there_before_ray_and_hears_its_address_whenever_it_starts(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    write = "os.write(int(sys.argv[-1]), json.dumps({%s}).encode() + b'\\n')\n"
    controllers = (
        f"Path({str(tmp_path / 'there')!r}).touch()\nline = sys.stdin.readline()\n"
        f"Path({str(heard)!r}).open('a').write(line)\n" + "if '--ready-fd' in sys.argv: " + write % "'pid': 1"
    )
    heads = (
        f"while not Path({str(tmp_path / 'there')!r}).exists(): time.sleep(0.01)\n"
        + write % "'address': f'ray:{time.time_ns()}'"
    )
    ray = ray_of(Config(), tmp_path, member_files("", tmp_path).files)
    for name in ("controller", "head"):
        (tmp_path / name).mkdir()
    ray._head = child(tmp_path / "head", heads)
    (controller,) = ray._controllers
    controller._child = child(tmp_path / "controller", controllers, awaits_line=True)
    await asyncio.wait_for(ray.start(), 20)
    await controller.start()
    assert await asyncio.wait_for(controller._child.ended(), 20) == 0
    await ray._restart_head(1)
    await controller.start()
    assert await asyncio.wait_for(controller._child.ended(), 20) == 0
    first, again, after = heard.read_text().split()
    assert first == again != after, "each Ray has an address of its own"
    await ray.stop()


async def test_a_ray_that_does_not_start_ends_the_controller_that_waits_for_it(tmp_path: Path) -> None:
    ray = ray_of(Config(), tmp_path, member_files("", tmp_path).files)
    for name in ("controller", "head"):
        (tmp_path / name).mkdir()
    there = f"Path({str(tmp_path / 'there')!r})"
    loses_signal = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{there}.touch()\n"
    ray._head = child(tmp_path / "head", f"while not {there}.exists(): time.sleep(0.01)\nsys.exit(3)")
    (controller,) = ray._controllers
    controller._child = child(
        tmp_path / "controller", f"{loses_signal}sys.exit(not sys.stdin.readline())", awaits_line=True
    )
    with pytest.raises(ConfigError, match="told ended with status 3"):
        await asyncio.wait_for(ray.start(), 20)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await asyncio.wait_for(ray.stop(), 20)
    assert controller._child.status == 1, "it was not killed"


async def test_workers_elsewhere_need_a_secret_that_they_have_too(tmp_path: Path) -> None:
    """And those of our own Ray get the paths of their own keys: no key is in an argument or in the environment."""
    config = Config(cluster=ClusterConfig(ray_address="127.0.0.1:1", grpc_port=0, http_port=0))
    with pytest.raises(ConfigError, match=r"set cluster\.secret \(BATON_CLUSTER_SECRET\) to a file that each of its"):
        await up._run([config], Console(quiet=True), lambda _: None)
    write_private(tmp_path / "secret", draw_secret())
    files = member_files(str(tmp_path / "secret"), tmp_path).files
    cluster = ClusterConfig(secret=str(tmp_path / "secret"))
    own = ray_of(Config(cluster=cluster), tmp_path, files)._controllers[0]._child
    joined = replace(cluster, ray_address="127.0.0.1:7")
    there = ray_of(Config(cluster=joined), tmp_path, files)._controllers[0]._child
    router = up._router(Config(cluster=cluster), 0, files)
    secrets = [
        Config.from_json(child._environment["BATON_CONFIG_JSON"]).cluster.secret for child in (own, there, router)
    ]
    assert secrets == [str(tmp_path / name) for name in ("controller.keys", "secret", "router.keys")]
    assert own._command[-2:] == ["--worker-keys", str(tmp_path / "worker.keys")]
    assert "--worker-keys" not in there._command
    planted = [
        line.split()[-1] for path in files.values() for line in path.read_text().splitlines() if "private" in line
    ]
    for child in (own, there, router):
        said = "\0".join([*child._command, *child._environment.values()])
        assert not any(key in said for key in (*planted, (tmp_path / "secret").read_text()))


def test_sizes_of_the_state_file_go_before_those_asked_for_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    config = Config(cluster=ClusterConfig(prefill=1, decode=1, state_file=str(path)))
    assert up._with_sizes(config).cluster == config.cluster
    save(path, ControllerState(desired={Role.PREFILL: 1, Role.DECODE: 1}))
    up._with_sizes(config)
    assert not caplog.records
    save(path, ControllerState(desired={Role.PREFILL: 2, Role.DECODE: 3}))
    found = up._with_sizes(config).cluster
    assert (found.prefill, found.decode) == (2, 3)
    assert "sets 2 prefill and 3 decode workers, which overrides --prefill 1 --decode 1" in caplog.text


def test_workers_in_a_ray_that_goes_on_are_known_to_the_next_cluster(tmp_path: Path) -> None:
    cache = ClusterConfig(cache_dir=str(tmp_path / "cache"))
    assert up._state_path(Config(cluster=cache), tmp_path) == tmp_path / "state.json"
    named = replace(cache, ray_address="10.0.0.1:6379", state_file="mine.json")
    assert up._state_path(Config(cluster=named), tmp_path) == Path("mine.json")
    joined = up._state_path(Config(cluster=replace(named, state_file="")), tmp_path)
    assert joined == tmp_path / "cache" / "clusters" / "10.0.0.1-6379.json"


async def test_a_setting_of_another_release_is_a_sentence_and_not_the_actors_end() -> None:
    actor = actors.WorkerActor("decode", "worker-0", "", '{"engine": {"of_tomorrow": 1}}', pool="decode")
    with pytest.raises(ConfigError, match=r"unknown setting engine\.of_tomorrow"):
        await actor.start()


async def test_a_worker_whose_name_another_process_has_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import os, sys; os.write(int(sys.argv[-1]), b'{json.dumps(REPORT)}\\n'); os._exit({FENCED})"
    monkeypatch.setattr(actors, "module_command", lambda *_: [sys.executable, "-c", code])
    with node(tmp_path) as here:
        monkeypatch.setenv(SOCKET, str(here.socket))
        fenced = Alone("decode", "worker-0", "127.0.0.1", Config().to_json(), pool="decode")
        with pytest.raises(
            WorkerFailed, match="another process has the name worker-0: does another cluster use this R"
        ):
            await fenced.ended()
        await let_go(fenced)


def test_a_start_that_takes_too_long_does_not_show_redis_password() -> None:
    config = Config(index=IndexConfig(redis_url="redis://me:planted@10.0.0.9:6379/1"))
    message = str(up._not_ready([config]))
    assert "redis://me:***@10.0.0.9:6379/1" in message
    assert "planted" not in message


@pytest.mark.parametrize(
    ("known", "desired", "is_whole"),
    [
        ((), {"prefill": 1, "decode": 2}, False),
        ((3,), {"prefill": 1, "decode": 2}, False),
        ((3, 2), {"prefill": 1, "decode": 2}, False),
        ((3, None), {"prefill": 1, "decode": 2}, False),
        ((3, 3), {"prefill": 1, "decode": 2}, True),
        ((3, 3), {"prefill": 1, "decode": 5}, True),
        ((2, 2), {"prefill": 1, "decode": 1}, True),
        ((0, 0), {}, False),
        ((0, 0), {"prefill": 0, "decode": 0}, False),
    ],
)
def test_a_cluster_is_ready_once_every_router_knows_every_worker(
    known: tuple[int | None, ...], desired: dict[str, int], is_whole: bool
) -> None:
    config = Config(cluster=ClusterConfig(prefill=1, decode=2, routers=2))
    assert up.is_whole(routers_that_know(config, *known), desired, config) is is_whole


def routers_that_know(config: Config, *known: int | None) -> list[RouterInfo]:
    """Routers with a second model, which is ready. Args: known: ready workers of the model; None: it is not served."""
    other = RoutedModel(content_id="other", ready_workers=9)
    own = content_id(config.kv_identity)
    models = [
        (other,) if number is None else (other, RoutedModel(content_id=own, ready_workers=number)) for number in known
    ]
    return [
        RouterInfo(id=f"r{i}", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0, ready_workers=9, models=served)
        for i, served in enumerate(models)
    ]


def test_a_model_that_sleeps_is_ready_once_every_router_serves_it() -> None:
    config = Config(
        cluster=ClusterConfig(prefill=0, decode=1), autoscale=AutoscaleConfig(enabled=True, min_prefill=0, min_decode=0)
    )
    asleep = {"prefill": 0, "decode": 0}
    assert up.is_whole(routers_that_know(config, 0), asleep, config)
    assert not up.is_whole(routers_that_know(config, None), asleep, config)
    assert not up.is_whole(routers_that_know(config, 0), {"prefill": 0, "decode": 1}, config)


def test_redis_password_goes_from_its_url_into_a_file_of_ours(tmp_path: Path) -> None:
    config = Config(index=IndexConfig(redis_url="redis://:planted%2F@10.0.0.9:6379/1"))
    found = up.with_password_file(config, tmp_path)
    assert (found.index.redis_url, found.index.url) == ("redis://10.0.0.9:6379/1", config.index.redis_url)
    assert Path(found.index.redis_password_file).stat().st_mode & 0o777 == 0o600
    assert up.with_password_file(found, tmp_path) == found
    unlocked = Config(index=IndexConfig(redis_url="redis://10.0.0.9:6379/1"))
    assert up.with_password_file(unlocked, tmp_path) == unlocked


def test_neither_ray_nor_the_controller_hears_of_the_routers_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATON_ROUTER_CACHE_SECRET", "BATON_API_KEY", "BATON_INDEX_REDIS_URL", "HF_TOKEN"):
        monkeypatch.setenv(name, f"planted-{name}")
    index = IndexConfig(redis_url="redis://:planted-redis@10.0.0.9:6379/1")
    config = Config(index=index, router=RouterConfig(cache_secret="planted-scopes"))
    keys = member_files("", tmp_path).files
    cluster = ray_of(config, tmp_path, keys)
    assert "planted" not in str(cluster._head._environment)
    controllers = str(cluster._controllers[0]._child._environment)
    assert "planted-redis" in controllers, "it connects to Redis"
    assert controllers.count("planted") == 1
    assert "planted" not in str(RayActors(config, "127.0.0.1", dict.fromkeys(Role, 0.0))._configs)
    assert "planted-scopes" in str(up._router(config, 0, keys)._environment)


async def test_a_port_of_the_metrics_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = ClusterConfig(grpc_port=free_port(), http_port=free_port())
        config = Config(cluster=cluster, telemetry=TelemetryConfig(port=port))
        with pytest.raises(ConfigError, match=rf"port {port}: .* set BATON_TELEMETRY_PORT"):
            await up._run([config], Console(), lambda _: None)
