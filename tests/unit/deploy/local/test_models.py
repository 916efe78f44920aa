"""The configurations of several models of one `baton up`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cluster import Role
from baton.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    ModelConfig,
    PoolConfig,
    PoolsConfig,
    RouterConfig,
)
from baton.errors import ConfigError
from deploy.cli.serve import UpOptions
from deploy.local import child as children
from deploy.local import up
from deploy.local.child import Child
from deploy.local.keys import member_files
from deploy.local.models import another_model, apart, require_distinct
from deploy.local.ray_cluster import RayCluster
from tests.support.waiting import until

BASE = Config(
    model=ModelConfig(id="org/big", served_name="big", revision="r1", release="big-1", share=3.0, weights="int8g"),
    engine=EngineConfig(draft_model="org/draft", num_threads=2),
    pools=PoolsConfig(decode=PoolConfig(engine={"draft_model": "org/other", "max_num_seqs": 7})),
    cluster=ClusterConfig(
        decode=2, name="mine", state_file="/var/states/mine.json", controller_port=7000, grpc_port=7001
    ),
    router=RouterConfig(mode="disaggregated"),
)


def another(**values: Mapping[str, Any]) -> Config:
    return another_model(BASE, values, "small.yaml")


def resolved(config: Config, revision: str) -> Config:
    """As after the model has been found."""
    name = config.model.served_name or config.model.id.rpartition("/")[2]
    return replace(config, model=replace(config.model, revision=revision, served_name=name))


def test_another_model_has_the_settings_of_the_cluster_but_none_of_the_first_models_own() -> None:
    small = another(model={"id": "org/small"})
    assert small.model == ModelConfig(id="org/small", weights="int8g")
    assert (small.engine.num_threads, small.engine.draft_model) == (2, "")
    assert small.pools.decode.engine == {"max_num_seqs": 7}
    assert (small.cluster.decode, small.cluster.grpc_port, small.router.mode) == (2, 7001, "disaggregated")
    assert (small.cluster.name, small.cluster.state_file, small.cluster.controller_port) == ("", "", 0)


def test_a_version_of_the_first_model_keeps_its_name_and_has_a_share_of_its_own() -> None:
    exact = another(model={"weights": "exact", "share": 9})
    assert exact.model == replace(BASE.model, weights="exact", share=9.0, release="")
    assert exact.engine.draft_model == "org/draft"
    require_distinct([BASE, exact])


def test_a_models_file_changes_what_may_differ() -> None:
    small = another(
        model={"id": "org/small", "release": "mini"},
        engine={"num_threads": 4},
        pools={"prefill": {"engine": {"num_blocks": 9}}},
        cluster={"prefill": 0, "decode": 3, "state_file": "s.json", "name": "n", "gpus_per_worker": 0.5},
        router={"mode": "aggregated"},
        autoscale={"enabled": True, "min_prefill": 0, "min_decode": 0},
    )
    assert (small.model.release, small.engine.num_threads, small.engine_of(Role.PREFILL).num_blocks) == ("mini", 4, 9)
    assert (small.cluster.prefill, small.cluster.decode, small.cluster.gpus_per_worker) == (0, 3, 0.5)
    assert (small.router.mode, small.autoscale.may_sleep) == ("aggregated", True)
    assert small.pools.decode.engine == {"max_num_seqs": 7}, "the other pool stays as it is"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"cluster": {"grpc_port": 1}},
            r"small.yaml has .* but cluster\.grpc_port applies to all models: set it in the",
        ),
        ({"router": {"id": "x"}}, r"router\.id applies to all models.* its own model, engine, .*cluster\.prefill"),
        ({"index": {"redis_url": "redis://x:1"}}, r"index\.redis_url applies to all models"),
        ({"engines": {"num_blocks": 1}}, r"engines\.num_blocks applies to all models"),
        (
            {"engine": {"num_blocsk": 1}},
            r"^small.yaml: unknown setting engine\.num_blocsk; did you mean engine\.num_bl",
        ),
        ({"model": {"share": -1}}, r"^small.yaml: model\.share must be 0 to 1000000"),
        ({"model": "org/small"}, r"^small.yaml: model must be a section of settings"),
    ],
)
def test_what_a_models_file_may_not_say(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        another(**values)


def test_models_that_cannot_be_served_together() -> None:
    big = resolved(BASE, "r1")
    with pytest.raises(ConfigError, match=r"big \(org/big\) is listed twice: it has the same weights"):
        require_distinct([big, resolved(another(model={"id": "org/big"}), "r1")])
    small = resolved(another(model={"id": "org/small", "release": "big-1"}), "r2")
    with pytest.raises(ConfigError, match=r"two models have the release 'big-1'; set model.release to another name"):
        require_distinct([big, small])
    small = resolved(another(model={"id": "org/small"}, cluster={"state_file": "/var/states/mine.json"}), "r2")
    with pytest.raises(ConfigError, match=r"two models have the same cluster\.state_file"):
        require_distinct([big, small])
    small = resolved(another(model={"id": "org/small"}, cluster={"name": "mine"}), "r2")
    with pytest.raises(ConfigError, match=r"two models have the same cluster\.name"):
        require_distinct([big, small])
    require_distinct([big, resolved(another(model={"id": "other/big"}), "r2")])


def test_each_model_has_its_own_namespace_and_state_file(tmp_path: Path) -> None:
    small = resolved(another(model={"id": "org/small", "release": "sm/all"}), "r2")
    own = resolved(
        another(model={"id": "org/own", "release": "o"}, cluster={"name": "n", "state_file": "o.json"}), "r3"
    )
    found = [each.cluster for each in apart([BASE, small, own])]
    assert found[0] == BASE.cluster
    assert (found[1].name, found[1].state_file) == ("mine-sm-all", "/var/states/mine-sm-all.json")
    assert (found[2].name, found[2].state_file) == ("n", "o.json")
    new = [replace(each, cluster=replace(each.cluster, state_file="")) for each in (BASE, small)]
    assert up._state_paths(new, tmp_path) == [tmp_path / "state.json", tmp_path / "state-sm-all.json"]


def test_models_of_the_command_line(tmp_path: Path) -> None:
    """The first file and the first --model are the cluster's; the others are one more model each."""
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"model": {"id": "org/b"}, "cluster": {"decode": 3}}))
    options = UpOptions(model=("org/a", "org/c"), prefill=2)
    found = options.of_each_model(Config(engine=EngineConfig(num_threads=2)), [tmp_path / "b.yaml"])
    assert [each.model.id for each in found] == ["org/a", "org/b", "org/c"]
    assert [(each.cluster.prefill, each.cluster.decode) for each in found] == [(2, 1), (2, 3), (2, 1)]
    assert {each.engine.num_threads for each in found} == {2}
    assert UpOptions().of_each_model(BASE, []) == [BASE]
    (tmp_path / "b.yaml").write_text("cluster: {host: 0.0.0.0}")
    with pytest.raises(ConfigError, match=r"b\.yaml has .* cluster\.host applies to all models"):
        options.of_each_model(Config(), [tmp_path / "b.yaml"])


async def test_a_controller_that_dies_is_restarted_and_those_of_other_models_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Ray dies, all of them get the address of the next one."""
    monkeypatch.setattr(children, "RESTART_S", 0.01)
    models = [BASE, resolved(another(model={"id": "org/small"}, router={"mode": "auto"}), "r2")]
    models = [replace(each, cluster=replace(each.cluster, controller_port=0)) for each in models]
    ray = RayCluster(models, [tmp_path / "1", tmp_path / "2"], member_files("", tmp_path).files)
    names = ["the controller of big-1", f"the controller of {models[1].release}"]
    assert [each._child.name for each in ray._controllers] == names
    assert ray._head._command[-1] == "6", "workers of both models"
    assert "--names-releases" in ray._node._command
    told = [tmp_path / "told-1", tmp_path / "told-2"]
    write = "os.write(int(sys.argv[-1]), json.dumps({%s}).encode() + b'\\n')\n"
    for controller, path in zip(ray._controllers, told, strict=True):
        code = (
            f"open({str(path)!r}, 'a').write(f'{{os.getpid()}} ' + sys.stdin.readline())\n"
            "if '--ready-fd' in sys.argv: " + write % "'pid': 1" + "time.sleep(60)"
        )
        controller._child = program(code, awaits_line=True)
    ray._head = program(write % "'address': f'ray:{os.getpid()}'" + "time.sleep(60)")
    ray._node = program(write % "'socket': 's'" + "time.sleep(60)")
    await asyncio.wait_for(ray.start(), 60)
    keeping = asyncio.create_task(ray.keep())
    try:
        os.kill(starts(told[0])[0][0], signal.SIGKILL)
        await until(lambda: len(starts(told[0])) == 2, 60)
        assert len(starts(told[1])) == 1, "it is not disturbed"
        os.kill(int(starts(told[0])[0][1].removeprefix("ray:")), signal.SIGKILL)
        await until(lambda: [len(starts(each)) for each in told] == [3, 2], 60)
        assert starts(told[0])[2][1] == starts(told[1])[1][1] != starts(told[0])[1][1], "the next Ray's address"
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await asyncio.gather(*(each._child.stop(1) for each in ray._controllers), ray._head.stop(1), ray._node.stop(1))


def program(code: str, *, awaits_line: bool = False) -> Child:
    child = Child("told", "told", (), {}, awaits_line=awaits_line)
    child._command = [sys.executable, "-c", f"import json, os, sys, time\n{code}"]
    return child


def starts(path: Path) -> list[tuple[int, str]]:
    """The process id of each start, and the address that the process was told."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if len(line.split()) == 2]


def test_routers_have_the_settings_of_the_first_model(tmp_path: Path) -> None:
    """They serve it from the start, and know which model serves requests that name none."""
    files = member_files("", tmp_path).files
    environment = up._router(replace(BASE, router=replace(BASE.router, default_model="big")), 0, files)._environment
    router = json.loads(environment["BATON_CONFIG_JSON"])
    assert router["model"]["id"] == "org/big"
    assert router["router"]["default_model"] == "big"
    assert "own_model" not in router["router"], "it serves the first model from the start"
