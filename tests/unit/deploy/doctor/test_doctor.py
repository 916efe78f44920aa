"""What `baton doctor` makes of what it finds. Each finding here is one that must not go unseen."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    IndexConfig,
    KubernetesConfig,
    ModelConfig,
    RouterConfig,
    TransferConfig,
)
from baton.errors import ConfigError, StoreUnavailable
from deploy.cli import main
from deploy.doctor import Check, DoctorPart, cluster, diagnose, machine, not_configured, redis, transports
from deploy.doctor.checks import guarded, names
from deploy.doctor.reach import Target, knock, reachability, wrongly_announced
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import CATALOGUE
from deploy.models.seal import seal

# -- this machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "cuda", "driver", "state", "words"),
    [
        ("auto", 0, "", "", "ok", "workers run on the CPU"),
        ("cpu", 0, "", "550.1", "ok", "CPU build"),
        ("auto", 0, "", "550.1", "warn", "CPU build"),
        ("auto", 0, "12.9", "450.1", "warn", "CUDA 12.9 needs an NVIDIA driver of 525 or newer, and this one is 450.1"),
        ("auto", 0, "13.0", "575.57", "warn", "CUDA 13.0 needs an NVIDIA driver of 580 or newer, and this one is 575"),
        ("cuda", 0, "13.0", "580.65.06", "fail", "though there is a driver, 580.65.06"),
        ("cuda", 0, "13.0", "of unknown version", "fail", "though there is a driver, of unknown version"),
        ("cuda", 0, "12.9", "", "fail", "no NVIDIA driver"),
        ("cuda", 0, "", "550.1", "fail", "CPU build"),
        ("cuda", 0, "12.9", "450.1", "fail", "driver of 525 or newer"),
        ("auto", 2, "12.9", "550.1", "ok", "2 x H200; CUDA 12.9, driver 550.1"),
        ("cuda", 2, "12.9", "", "ok", "driver unknown"),
        ("cpu", 2, "12.9", "550.1", "warn", "model.device is cpu"),
    ],
)
def test_gpus_are_there_where_the_configuration_asks_for_them(
    wanted: str, num_gpus: int, cuda: str, driver: str, state: str, words: str
) -> None:
    check = machine.gpu(wanted, 0, machine.Gpus(num=num_gpus, names="H200", cuda=cuda, driver=driver))
    assert (check.state, bool(check.fix)) == (state, state != "ok")
    assert words in check.found


@pytest.mark.parametrize(("wanted", "state"), [("auto", "fail"), ("cuda", "fail"), ("cpu", "ok")])
def test_a_gpu_that_torch_cannot_use_is_not_passed_over(wanted: str, state: str) -> None:
    old = machine.Gpus(num=0, names="", cuda="13.0", driver="550.1", sign="/dev/nvidia0")
    check = machine.gpu(wanted, 0, old)
    assert check.state == state
    assert ("model.device to cpu" in check.fix) == (wanted == "auto")


def test_an_instance_of_a_gpu_is_named_as_such() -> None:
    mig = machine.Gpus(num=1, names="NVIDIA H200 MIG 1g.18gb", cuda="12.9", driver="550.1")
    check = machine.gpu("auto", 0, mig)
    assert check.state == "warn"
    assert "give every worker of this machine the first instance" in check.found
    assert "worker.gpu.resource" in check.fix


def test_every_rank_of_a_worker_needs_a_gpu() -> None:
    two = machine.Gpus(num=2, names="H200", cuda="12.9", driver="550.1")
    assert machine.gpu("auto", 2, two).state == "ok"
    check = machine.gpu("auto", 4, two)
    asked = "2 x H200; CUDA 12.9, driver 550.1; engine.tensor_parallel needs 4 here"
    assert (check.state, check.found) == ("fail", asked)
    assert machine.gpu("auto", 4, machine.Gpus(num=0, names="", cuda="", driver="")).state == "ok", (
        "on CPUs ranks share what there is"
    )


@pytest.mark.parametrize(
    ("setting", "up", "state", "words"),
    [
        ("", ["lo", "docker0", "eth0"], "ok", "is not set: eth0"),
        ("", ["lo"], "warn", "only the loopback, lo"),
        ("eth", ["lo", "eth0", "eth1"], "ok", "eth0, eth1"),
        ("=eth", ["lo", "eth0"], "fail", "matches no interface that is up (eth0, lo)"),
        ("=eth0,ib0", ["lo", "eth0"], "ok", "=eth0,ib0: eth0"),
        ("^eth,docker", ["lo", "eth0", "ib0"], "ok", "ib0"),
        ("^=eth0", ["eth0"], "fail", "matches no interface"),
        ("lo", ["lo", "eth0"], "warn", "only the loopback"),
        ("bond", ["lo", "eth0"], "fail", "matches no interface"),
    ],
)
def test_nccl_finds_a_network_by_its_own_rules(setting: str, up: list[str], state: str, words: str) -> None:
    check = transports.nccl_interfaces(setting, up)
    assert check.state == state
    assert words in check.found


def test_nccl_between_machines_needs_a_trusted_network_beside_certificates() -> None:
    def look(certificate: str, *plain: str, links: tuple[str, ...] = ("nccl", "tcp")) -> list[Check]:
        transfer = TransferConfig(transports=links, plaintext_transports=plain)
        return list(
            transports.nccl_beside_tls(Config(cluster=ClusterConfig(tls_certificate=certificate), transfer=transfer))
        )

    assert look("") == look("tls.crt", links=("tcp",)) == []
    (check,) = look("tls.crt")
    assert check.state == "warn"
    assert "uses tcp, because nccl cannot encrypt and cluster.tls_certificate is set" in check.found
    assert "transfer.plaintext_transports" in check.fix
    (check,) = look("tls.crt", "nccl")
    assert (check.state, check.fix) == ("ok", "")


def rdma_device(folder: Path, name: str, state: str) -> None:
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"4: {state}\n")


def test_rdma_devices_have_to_be_active_open_and_lockable(tmp_path: Path) -> None:
    devices, nodes, much = tmp_path / "infiniband", tmp_path / "dev", 2**40
    nodes.mkdir()

    def look(is_disabled: bool = False, memlock: int = much, is_capable: bool = False) -> Check:
        return transports.rdma(devices, nodes, is_disabled, transports.Locking(memlock, is_capable))

    assert look() == Check("rdma", "ok", "no devices: NCCL uses TCP between nodes")
    rdma_device(devices, "mlx5_0", "DOWN")
    assert "no port is active" in look().fix
    rdma_device(devices, "mlx5_1", "ACTIVE")
    assert "device plugin" in look().fix
    (nodes / "uverbs0").touch()
    assert look() == Check("rdma", "ok", "mlx5_0 DOWN, mlx5_1 ACTIVE")
    assert look(memlock=-1).state == "ok"
    assert look(memlock=65536, is_capable=True).state == "ok", "as root, with IPC_LOCK"
    refused = look(memlock=65536)
    assert refused.state == "fail"
    assert "the memlock limit is 64 KiB, and CapEff has no IPC_LOCK" in refused.found
    assert "LimitMEMLOCK=infinity" in refused.fix
    assert "NCCL_IB_DISABLE=1" in look(is_disabled=True).found


def test_the_capability_counts_only_where_it_has_effect(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert not transports.may_lock_memory(status)
    status.write_text("CapPrm:\t0000000000004000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000004000\n")
    assert not transports.may_lock_memory(status), "added to the container of a user that is not root"
    status.write_text("CapInh:\t0000000000000000\nCapEff:\t0000000000004000\n")
    assert transports.may_lock_memory(status)
    status.write_text("CapEff:\t000001ffffffbfff\n")
    assert not transports.may_lock_memory(status)


def test_a_worker_wants_the_memory_that_it_is_told_to_take() -> None:
    three = EngineConfig(tensor_parallel=3, kv_cache_gib=1.5)
    assert machine.worker_memory_gib(Config(engine=three)) == 4.5
    assert machine.worker_memory_gib(Config()) == 0.75


def test_a_driver_is_known_by_the_kernels_word_or_by_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_driver(tmp_path / "version") == ""
    (tmp_path / "nvidia-smi").touch(0o755)
    assert machine.nvidia_driver(tmp_path / "version") == "of unknown version"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '570.1.2\\n570.1.2\\n'\n")
    assert machine.nvidia_driver(tmp_path / "version") == "570.1.2"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n")
    assert machine.nvidia_driver(tmp_path / "version") == "550.54.15"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    assert machine.nvidia_driver(tmp_path / "version") == "580.65.06"


def test_open_files_suffice_for_the_clients() -> None:
    assert machine.file_limit(768, 768, 768).state == "ok"
    assert machine.file_limit(-1, -1, 768).state == "ok"
    assert machine.file_limit(767, 4096, 768).fix == "ulimit -n 768"
    assert "the hard limit is 512" in machine.file_limit(512, 512, 768).fix


def test_a_small_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_SHM_MIB", 10**12)
    (check,) = machine.shared_memory(path=tmp_path)
    assert (check.state, "medium Memory" in check.fix) == ("warn", True)
    monkeypatch.setattr(machine, "MIN_SHM_MIB", 0)
    assert next(machine.shared_memory(path=tmp_path)).state == "ok"
    assert "there is no" in next(machine.shared_memory(path=tmp_path / "none")).found


def test_ranks_on_cpus_need_shared_memory_for_their_caches(tmp_path: Path) -> None:
    one, three = (
        Config(model=ModelConfig(device="cpu"), engine=EngineConfig(tensor_parallel=ranks, kv_cache_gib=1.5))
        for ranks in (1, 3)
    )
    assert (machine.ranks_memory_mib(one), machine.ranks_memory_mib(three)) == (0, 3072)
    assert next(machine.shared_memory(10.0**12, tmp_path)).state == "warn"


def test_who_has_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = Config(cluster=ClusterConfig(grpc_port=port, http_port=1))
        check = next(c for c in machine.ports(config) if c.name == f"port {port}")
    assert check.state == "fail"
    assert f"(pid {os.getpid()})" in check.found
    assert "BATON_GRPC_PORT" in check.fix
    assert next(machine.ports(config)).state == "ok", "it is free again"


def test_a_tenants_file_is_read_as_a_router_does(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"

    def look() -> Check:
        (check,) = machine.tenants(Config(router=RouterConfig(tenants_file=str(path))))
        return check

    assert look().state == "fail"
    path.write_text(f"acme: {{key_sha256: ['{'a' * 64}']}}")
    assert look() == Check("tenants", "ok", f"{path} is valid")
    path.write_text(f"acme: {{key_sha256: ['{'a' * 64}'], slo_class: gold}}")
    assert "no SLO class is called 'gold'" in look().found
    assert next(machine.tenants(Config())).state == "ok"


def test_a_model_has_to_be_there_before_a_container_starts(tmp_path: Path) -> None:
    def look(is_needed: bool, **model: Any) -> Check:
        config = Config(model=ModelConfig(**model), cluster=ClusterConfig(cache_dir=str(tmp_path)))
        (check,) = machine.model(config, is_needed)
        return check

    assert look(is_needed=True).state == "fail"
    assert look(is_needed=False).state == "warn"
    tokenizer = tmp_path / "models" / CATALOGUE["smollm2-135m-instruct"].tokenizer_folder_name
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer.json").touch()
    assert look(is_needed=True).state == "fail", "a worker needs its weights"
    config = Config(cluster=ClusterConfig(cache_dir=str(tmp_path)))
    assert [check.state for check in machine.model(config, is_needed=True, weights=False)] == ["ok"]
    folder = tmp_path / "models" / CATALOGUE["smollm2-135m-instruct"].folder_name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert look(is_needed=True).state == "ok"
    seal(folder)
    (folder / "tokenizer.json").touch()
    assert look(is_needed=True).state == "ok"
    seal(folder)
    (folder / "tokenizer.json").unlink()
    check = look(is_needed=False)
    assert (check.state, check.found.endswith("is damaged: tokenizer.json is missing")) == ("fail", True)
    assert "has no config.json" in look(is_needed=True, path=str(folder)).found
    assert "does not exist" in look(is_needed=True, id="/nowhere/model").found
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").touch()
    assert look(is_needed=True, path=str(folder)).state == "ok"
    assert look(is_needed=False, id="org/name") == Check("model", "ok", "org/name comes from the Hugging Face hub")
    assert look(is_needed=True, id="org/name").state == "fail", "nobody has fetched it"


def test_packages_are_compared_with_what_the_extras_allow_that_count() -> None:
    (good,) = machine.packages({"worker"})
    assert (good.state, good.found) == ("ok", "all versions are suitable")


def test_a_package_of_another_version_is_named_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wrong = importlib.metadata.version, {"redis", "torch"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name in wrong else found(name))
    (check,) = machine.packages(set())
    assert (check.state, check.found.count("0.1")) == ("fail", 1)
    assert check.found.startswith("redis 0.1 (needs ")
    (check,) = machine.packages({"worker"})
    assert "torch 0.1 (needs " in check.found


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    assert machine.writable("x", tmp_path / "a" / "b", "setting").state == "ok"
    assert not (tmp_path / "a").exists(), "it only looks"
    (tmp_path / "file").touch()
    assert machine.writable("x", tmp_path / "file" / "b", "setting").state == "fail"


def test_a_part_that_breaks_does_not_hide_the_others() -> None:
    def look() -> Iterator[Check]:
        yield Check("a", "ok", "well")
        raise OSError("gone")

    assert guarded("b", look, "fix it") == [Check("a", "ok", "well"), Check("b", "fail", "OSError: gone", "fix it")]
    assert guarded("b", look)[1].fix == "reinstall it: pip install 'baton-serving[local,worker]' --force-reinstall"


def test_long_lists_are_cut() -> None:
    assert names(["c", "a", "b"], most=2) == "a, b and 1 more"


# -- Redis -------------------------------------------------------------------------------------------------------------

FACTS = redis.Facts(
    product="Redis",
    version="7.2.4",
    policy="noeviction",
    appends=False,
    saves="",
    round_trip_s=0.001,
    ahead_s=0.0,
)


def findings(**changed: Any) -> dict[str, Check]:
    return {check.name: check for check in redis.server("redis://h:1/0", replace(FACTS, **changed))}


def test_a_redis_as_it_should_be_has_nothing_to_fix() -> None:
    assert {check.state for check in findings().values()} == {"ok"}
    assert findings(appends=True)["redis persistence"] == Check("redis persistence", "ok", "appendonly")


@pytest.mark.parametrize(
    ("changed", "name", "state"),
    [
        ({"version": "6.0.16"}, "redis version", "fail"),
        ({"policy": "allkeys-lru"}, "redis eviction", "fail"),
        ({"saves": "3600 1"}, "redis persistence", "warn"),
        ({"round_trip_s": 0.02}, "redis round trip", "warn"),
        ({"ahead_s": 3.0}, "clock", "warn"),
        ({"ahead_s": -3.0}, "clock", "warn"),
    ],
)
def test_what_is_wrong_with_a_redis_is_told(changed: dict[str, Any], name: str, state: str) -> None:
    found = findings(**changed)
    assert {check.name: check.state for check in found.values() if check.state != "ok"} == {name: state}
    assert found[name].fix


def test_a_version_is_compared_by_numbers() -> None:
    assert findings(version="10.0.1")["redis version"].state == "ok"
    assert findings(version="6.2.0")["redis version"].state == "ok"


def test_a_clock_is_not_blamed_for_the_network() -> None:
    assert findings(ahead_s=3.0, round_trip_s=3.0)["clock"].state == "ok"


# -- addresses ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deaf_listener() -> Iterator[str]:
    """An address at which connections are neither accepted nor refused, as behind a policy that drops."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):  # its queue is full
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_what_blocks_an_address_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert knock(address) == ""
    assert knock(address) == "refused"
    assert knock("no-such-host.invalid:1") == "unknown name"
    assert "is not HOST:PORT" in knock("nonsense")
    with deaf_listener() as deaf:
        assert knock(deaf, timeout_s=0.3) == "timed out"


def test_addresses_that_do_not_answer_are_told_by_what_blocks_them() -> None:
    answers = {"a:1": "", "b:1": "timed out", "c:1": "refused", "d:1": "timed out"}
    targets = [Target(name.partition(":")[0], name) for name in answers]
    checks = list(reachability(targets, is_inside=True, knock=answers.__getitem__))
    assert checks[0] == Check("reachable", "ok", "1 of 4 addresses of the cluster can be reached from here")
    assert [(c.state, c.found) for c in checks[1:]] == [
        ("fail", "refused: c (c:1)"),
        ("fail", "timed out: b (b:1), d (d:1)"),
    ]
    assert "NetworkPolicy" in checks[2].fix
    outside = list(reachability(targets, is_inside=False, knock=answers.__getitem__))
    assert {c.state for c in outside[1:]} == {"warn"}
    assert all("outside the cluster" in c.fix for c in outside[1:])


def test_addresses_that_are_somebody_elses_to_everybody_are_told() -> None:
    targets = [Target("a", "0.0.0.0:1"), Target("b", "127.0.0.1:1"), Target("c", "10.0.0.1:1")]
    assert [c.name for c in wrongly_announced(targets, is_one_machine=True)] == ["address of a"]
    assert [(c.name, c.state) for c in wrongly_announced(targets, is_one_machine=False)] == [
        ("address of a", "warn"),
        ("address of b", "fail"),
    ]


# -- a cluster that runs -----------------------------------------------------------------------------------------------


def status(*workers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"pools": {}, "routers": [], "workers": list(workers), **fields}


def draining(progress: int, state: str = "draining", running: int = 1) -> dict[str, Any]:
    return {
        "id": "d0", "epoch": 1, "state": state, "running": running, "waiting": 0, "computed_tokens": progress,
    }  # fmt: skip


def test_a_drain_that_does_not_move_is_told() -> None:
    (stuck,) = cluster.drains(status(draining(5)), lambda: status(draining(5)), wait_s=0)
    assert (stuck.state, stuck.found) == ("warn", "1 running, 0 waiting, no progress")
    (moving,) = cluster.drains(status(draining(5)), lambda: status(draining(6)), wait_s=0)
    assert moving.state == "ok"
    (empty,) = cluster.drains(status(draining(5, running=0)), lambda: status(draining(5, running=0)), wait_s=0)
    assert "replacement" in empty.fix
    assert not list(cluster.drains(status(draining(5)), lambda: status(), wait_s=0)), "it is gone"
    assert not list(cluster.drains(status(draining(5, "ready")), lambda: status(), wait_s=0))


def test_versions_that_differ_are_told() -> None:
    def look(**found: str) -> Check:
        (check,) = cluster.versions(found, "0.2.0")
        return check

    assert look(router="0.2.0", d0="0.2.0").state == "ok"
    assert look(router="0.2.0", d0="0.1.0").found == "0.1.0: d0; 0.2.0: router"
    assert look(router="0.1.0").found == "the cluster is 0.1.0, this command 0.2.0"
    assert "does not report its version" in look().found


def test_a_router_whose_index_is_behind_is_told() -> None:
    routers = [{"id": "r0", "mirror_lag_s": 0.1}, {"id": "r1", "mirror_lag_s": 7.0}]
    (behind,) = cluster.mirrors(status(routers=routers))
    assert (behind.state, behind.found) == ("warn", "behind: r1 by 7.0 s")
    (current,) = cluster.mirrors(status(routers=routers[:1]))
    assert current.state == "ok"


def test_a_key_that_is_needed_or_wrong_is_told() -> None:
    refusal = json.dumps({"error": {"message": "an API key is needed"}}).encode()
    assert cluster.key_check(200, b"{}", False, []) == Check("api key", "ok", "none is needed")
    assert cluster.key_check(200, b"{}", True, ["10.0.0.1"]) == Check("api key", "ok", "yours is accepted")
    needed, wrong = cluster.key_check(401, refusal, False, []), cluster.key_check(401, refusal, True, [])
    assert (needed.state, needed.found, wrong.state) == ("warn", "an API key is needed", "fail")
    assert cluster.key_check(502, b"<html>", False, []).found == "HTTP status 502"


def test_a_router_that_serves_everybody_where_others_can_reach_it_is_told() -> None:
    check = cluster.key_check(200, b"{}", False, ["10.0.0.1"])
    assert (check.state, check.found) == ("warn", "none is needed: 10.0.0.1 serves any client that can reach it")
    assert "router.tenants_file" in check.fix
    routers = [{"grpc": address} for address in ("10.0.0.1:50051", "[::1]:50051", "localhost:1", "[fd00::1]:8000")]
    assert cluster._others(status(routers=routers)) == ["10.0.0.1", "fd00::1"]


# -- parts -------------------------------------------------------------------------------------------------------------


def states(part: DoctorPart, config: Config, environ: dict[str, str] | None = None) -> dict[str, str]:
    return {check.name: check.state for check in diagnose(config, "", part, environ=environ or {})}


def test_every_part_needs_a_redis() -> None:
    for part in (DoctorPart.ROUTER, DoctorPart.CONTROLLER, DoctorPart.WORKER):
        assert states(part, Config())["redis"] == "fail"
        lost = Config(index=IndexConfig(redis_url="redis://127.0.0.1:1/0"))
        assert states(part, lost)["redis"] == "fail", "it has to answer"


def test_a_router_needs_what_baton_run_asks_for(tmp_path: Path) -> None:
    bare = states(DoctorPart.ROUTER, Config(cluster=ClusterConfig(cache_dir=str(tmp_path), host="0.0.0.0")))
    assert (bare["cache secret"], bare["address"], bare["model"], bare["tenants"]) == ("fail", "warn", "fail", "ok")
    config = Config(
        router=RouterConfig(cache_secret="x"),
        cluster=ClusterConfig(cache_dir=str(tmp_path), host="0.0.0.0", advertise_host="10.0.0.1"),
    )
    found = states(DoctorPart.ROUTER, config)
    assert (found["cache secret"], found["address"]) == ("ok", "ok")
    announced = replace(config, router=replace(config.router, own_model=False))
    assert found.keys() - states(DoctorPart.ROUTER, announced).keys() == {"model"}, "it serves those of others"


def test_a_controller_needs_a_name_a_state_file_and_the_api_server(tmp_path: Path) -> None:
    assert (states(DoctorPart.CONTROLLER, Config()))["state file"] == "fail"
    cluster_config = ClusterConfig(name="baton", state_file=str(tmp_path / "state.json"))
    config = Config(cluster=cluster_config, kubernetes=KubernetesConfig(namespace="default"))
    api_server = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    found = states(DoctorPart.CONTROLLER, config, api_server)
    assert (found["cluster name"], found["state folder"], found["state file"]) == ("ok", "ok", "ok")
    assert found["unreachable"] == "fail"
    (tmp_path / "state.json").write_text("{}")
    assert states(DoctorPart.CONTROLLER, config)["state file"] == "fail", "it is no controller's"


def test_a_worker_that_asks_for_a_gpu_needs_one(tmp_path: Path) -> None:
    import torch

    config = Config(model=ModelConfig(device="cuda"), cluster=ClusterConfig(cache_dir=str(tmp_path)))
    expected = "ok" if torch.cuda.is_available() else "fail"
    assert states(DoctorPart.WORKER, config)["gpu"] == expected
    assert "gloo" not in states(DoctorPart.WORKER, Config(model=ModelConfig(device="cpu")))
    config = Config(model=ModelConfig(device="cpu"), engine=EngineConfig(tensor_parallel=2))
    found = states(DoctorPart.WORKER, config)
    assert (found["gpu"] in ("ok", "warn"), found["gloo"], found["packages"]) == (True, "ok", "ok")


def test_a_configuration_that_cannot_be_read_is_a_check_too() -> None:
    (check,) = not_configured(ConfigError("unknown setting x"))
    assert (check.name, check.state, check.found) == ("configuration", "fail", "unknown setting x")


def test_a_redis_that_is_away_says_where_it_was_looked_for_without_its_password() -> None:
    (check,) = redis.server("redis://:secret@h:1/0", StoreUnavailable("Redis: refused"))
    assert check.state == "warn"
    assert "secret" not in check.fix
    assert "h:1" in check.fix


COMMAND = """
import os, sys
from deploy.cli import main

for settings in ({"BATON_ROUTER_MODE": "wrong"}, {}):
    os.environ.pop("BATON_ROUTER_MODE", None)
    os.environ.update(settings)
    sys.argv = ["baton", "doctor", "--part", "router", "--json"]
    try:
        main()
    except SystemExit as end:
        print("status", end.code)
    print("---")
print([m for m in ("torch", "ray", "transformers") if m in sys.modules])
"""


def test_the_command_ends_with_status_1_and_json_when_something_fails_and_loads_neither_torch_nor_ray() -> None:
    """In one process, with settings that cannot be read, and with those that everybody has."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    *runs, loaded = done.stdout.split("---\n")
    texts, statuses = zip(*(run.rpartition("status ")[::2] for run in runs), strict=True)
    unread, checked = map(json.loads, texts)
    assert statuses == ("1\n", "1\n")
    assert [c["name"] for c in unread] == ["configuration"]
    assert "router.mode must be one of" in unread[0]["found"]
    assert checked[0]["state"] == "ok"
    assert loaded == "[]\n"


def test_a_cluster_that_is_asked_for_has_to_answer() -> None:
    (check,) = diagnose(Config(), "127.0.0.1:1", DoctorPart.CLUSTER, environ={})
    assert (check.name, check.state, check.found) == ("router", "fail", "none answers at 127.0.0.1:1")


def test_a_container_can_wait_for_its_redis(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")} | {
        "BATON_INDEX_REDIS_URL": f"redis://127.0.0.1:{port}/0",
        "BATON_CLUSTER_NAME": "baton",
        "BATON_CLUSTER_STATE_FILE": str(tmp_path / "state.json"),
    }
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--part", "controller"]
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["baton", *command[3:]])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 1, "it does not wait by itself"
    with subprocess.Popen([*command, "--wait", "30"], env=environment, stdout=subprocess.DEVNULL) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(4)
        with EmbeddedRedis(port=port):
            assert waiting.wait(30) == 0
