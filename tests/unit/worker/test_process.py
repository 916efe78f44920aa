"""What a worker's process makes of its settings before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton import garbage
from baton.cluster import Role
from baton.config import (
    OWN_SETTINGS,
    ClusterConfig,
    Config,
    EngineConfig,
    EveryEngineConfig,
    ModelConfig,
    TestingConfig,
)
from baton.errors import BatonError, ConfigError, ModelLoadError
from baton.trust import KeyFile, Principal, draw_secret, write_private
from engine.core.loop import EngineLoop
from engine.core.serving import ServingEngine
from engine.engines import make_engine
from engine.testing import ArithmeticRunner
from tests.unit.engine.scripted import ScriptedEngine
from tests.unit.kvstore.transfer.peers import make_spec
from worker.log import NodeProcess
from worker.process import main, serve

ARITHMETIC = TestingConfig(arithmetic=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_cache_gib": 2.0}, r"engine\.kv_cache_gib is not supported by testing\.arithmetic; unset it"),
        (
            {"kv_dtype": "fp8", "kv_cache_gib": 2.0},
            r"engine\.kv_cache_gib and engine\.kv_dtype are not supported by testing\.arithmetic; unset them",
        ),
        (
            {"draft_model": "/drafts", "draft_kv_cache_gib": 1.0},
            r"engine\.draft_kv_cache_gib and engine\.draft_model are not supported by testing\.arithmetic; unset them",
        ),
    ],
    ids=str,
)
def test_what_the_engine_does_not_know_is_refused_by_name_at_start(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """Before anything is loaded: there is no model here."""
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        make_engine(Config(engine=EngineConfig(**settings), testing=ARITHMETIC), tmp_path)


def test_what_the_engine_knows_is_heeded(tmp_path: Path) -> None:
    engine = EngineConfig(block_size=32, num_blocks=8, max_waiting=3, num_threads=2, memory_share=0.5, kv_cache_gib=0)
    testing = replace(ARITHMETIC, step_ms=6.0, token_ms=2.0)
    made = make_engine(Config(engine=engine, testing=testing), tmp_path)
    assert (made.spec.block_size, made.num_blocks, made.max_waiting(make_spec([1]))) == (32, (8,), 3)
    assert isinstance(made, EngineLoop)
    runner = made.engine.runner
    assert isinstance(runner, ArithmeticRunner)
    assert (runner.layer_s, runner.token_s) == (0.003, 0.002)


def test_weights_that_a_runner_does_not_make_are_refused_by_name(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(weights="int8g"), testing=ARITHMETIC)
    with pytest.raises(ConfigError, match=r"model\.weights int8g needs the native step: testing\.arithmetic is set"):
        make_engine(config, tmp_path)


OTHER_VALUES = {
    "attention": "flashinfer", "speculation": "off", "kv_dtype": "int8", "plan_ahead": True, "batch_invariant": True,
    "expert_parallel": True, "images": "off", "vllm_python": "/python", "vllm_args": {"enforce_eager": True},
}  # fmt: skip
"""Values that are no numbers, of settings that take none."""


@pytest.mark.parametrize("name", sorted(OWN_SETTINGS | {"kv_cache_gib"}))
def test_an_engine_of_another_make_says_what_it_does_not_know(name: str) -> None:
    EngineConfig(block_size=32, num_blocks=8).refuse_unknown(ScriptedEngine.unknown_settings, "engine.runner")
    setting: dict[str, Any] = {name: OTHER_VALUES.get(name, 7)}
    if name == "expert_parallel":
        setting["tensor_parallel"] = 2  # it needs ranks, which any engine may have
    if name.startswith("vllm_"):
        setting |= {"runner": "vllm", "vllm_python": "/python"}  # no other runner takes them
    named = " and ".join(rf"engine\.{each}" for each in sorted(setting.keys() - {"runner"}))
    with pytest.raises(ConfigError, match=rf"{named} (is|are) not supported by engine\.runner; unset (it|them)"):
        EngineConfig(**setting).refuse_unknown(ScriptedEngine.unknown_settings, "engine.runner")


async def test_the_collector_is_told_of_what_is_loaded_before_anything_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full collection over a model's modules would stop every stream for a tenth of a second."""

    def tell() -> None:
        raise BatonError("told")

    monkeypatch.setattr(garbage, "keep_what_is_loaded", tell)
    with pytest.raises(BatonError, match="told"):
        await serve(
            Config(engine=EngineConfig(block_size=32, num_blocks=8), testing=ARITHMETIC), Role.DECODE, "d", "127.0.0.1"
        )


async def test_a_worker_whose_pairs_cannot_be_ended_drains_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, drained = asyncio.Event(), asyncio.Event()

    async def drain(timeout_s: float) -> int:
        drained.set()
        return 0

    @contextlib.asynccontextmanager
    async def running(*_: Any, node: NodeProcess | None) -> AsyncGenerator[tuple[Any, asyncio.Task[None]]]:
        assert node == NodeProcess(Path("socket"))
        ended = asyncio.create_task(asyncio.sleep(60))
        yield SimpleNamespace(member=SimpleNamespace(kv=SimpleNamespace(stuck=stuck.wait)), drain=drain), ended
        ended.cancel()

    monkeypatch.setattr("worker.process.running", running)
    config = Config(engine=EngineConfig(block_size=32, num_blocks=8), testing=ARITHMETIC)
    serving = asyncio.create_task(serve(config, Role.DECODE, "d", "127.0.0.1", node=NodeProcess(Path("socket"))))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(drained.wait()), 0.5)
    stuck.set()
    await asyncio.wait_for(serving, 10)
    assert drained.is_set()


def test_nccl_logs_into_a_folder_of_the_worker_that_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = list[Path]()

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        folders.append(Path(os.environ["NCCL_DEBUG_FILE"]).parent)
        assert folders[0].is_dir()
        raise ExceptionGroup("", [BatonError("it ends")])

    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that what `main` sets goes again
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATON_CONFIG_JSON", Config().to_json())
    monkeypatch.setattr("sys.argv", ["worker", "decode", "d", "127.0.0.1"])
    monkeypatch.setattr("uvloop.run", run)
    monkeypatch.setattr("baton.telemetry.logs.configure", lambda *_: None)
    with pytest.raises(SystemExit, match="it ends"):
        main()
    assert not folders[0].exists()


@pytest.mark.parametrize(
    ("speculation", "sentence"), [("ngram", "names a folder that does not exist: /drafts"), ("off", "/no-model")]
)
def test_a_draft_model_is_loaded_unless_speculation_is_off(speculation: str, sentence: str, tmp_path: Path) -> None:
    engine = EngineConfig(draft_model="/drafts", speculation=speculation)
    with pytest.raises(ModelLoadError, match=sentence):
        make_engine(Config(engine=engine, model=ModelConfig(path="/no-model")), tmp_path)


async def test_a_worker_without_the_clusters_keys_ends_its_start_with_a_sentence(tmp_path: Path) -> None:
    """Before it loads a model. A key's name is enough to know it by."""

    def make(config: Config, cache: Path) -> ServingEngine:
        raise BatonError("it would start")

    async def start(secret: str, host: str = "10.9.9.9") -> None:
        config = Config(testing=ARITHMETIC, cluster=ClusterConfig(secret=secret))
        await serve(config, Role.DECODE, "w", host, fingerprint=fingerprint, make=make)

    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    secrets = {path: draw_secret() for path in (own, other)}
    for path, text in secrets.items():
        write_private(Path(path), text)
    fingerprint = KeyFile(own, Principal.CONTROLLER).keys.fingerprint
    for secret, said in (
        (own, "it would start"),
        (other, f"the keys in {other} on .* are not those of this cluster's controller"),
        (str(tmp_path / "none"), "cannot read the keys in .*none: No such file"),
        ("", "without cluster.secret .* this worker's address is 10.9.9.9"),
    ):
        with pytest.raises(BatonError, match=said):
            await start(secret)
    with pytest.raises(ConfigError, match="the keys in no file on"):
        await start("", "127.0.0.1")
    write_private(Path(other), f"{secrets[other]}\n{secrets[own]}")
    with pytest.raises(BatonError, match="it would start"):  # the secret changes, and this machine has the new one
        await start(other)
    fingerprint = ""
    with pytest.raises(BatonError, match="it would start"):
        await start("", "127.0.0.1")


def test_settings_are_every_engines_or_our_own() -> None:
    every = {each.name for each in dataclasses.fields(EveryEngineConfig)}
    both = {each.name for each in dataclasses.fields(EngineConfig)}
    assert not every & OWN_SETTINGS
    assert every | OWN_SETTINGS == both
    assert {"max_waiting", "output_reservation"} <= OWN_SETTINGS
