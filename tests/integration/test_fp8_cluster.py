"""A cluster whose workers keep KV in 8-bit floats answers as one engine that does, and takes no KV of another type."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, load
from deploy.models import cache_dir
from engine.model.transformers_runner import TransformersRunner
from engine.runners import make_runner
from kvstore.transfer.protocol.plan import layout_of, mismatch
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.test_engine_models import answers, engine_of
from tests.support.asking import prompt_of, sampling
from tests.support.builders import sequence_spec

pytestmark = [pytest.mark.integration, pytest.mark.chaos]
NUM_TOKENS = 8
LENGTHS = (16, 33, 150)
"""Tokens of the prompts: one block, not whole ones, many."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        engine_kv_dtype="fp8",
        engine_runner="transformers",
        engine_num_blocks="64",
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000}}',
    ) as cluster:
        yield cluster


def test_streams_are_those_of_an_engine_alone(cluster: Cluster, model_dir: Path) -> None:
    prompts = [prompt_of(number, length) for number, length in enumerate(LENGTHS)]
    got = [cluster.generate(token_ids=prompt, sampling=sampling(NUM_TOKENS)) for prompt in prompts]
    assert {(answer.timing.mode, answer.timing.retries) for answer in got} == {("disaggregated", 0)}
    config = EngineConfig(runner="transformers", kv_dtype="fp8", num_blocks=64)
    model = ModelConfig(path=str(model_dir), device="cpu")
    runner = make_runner(model, config, cache_dir(load().cluster))
    assert isinstance(runner, TransformersRunner)
    expected = [
        answers(engine_of(runner, config), [sequence_spec(prompt, f"{at}", max_tokens=NUM_TOKENS)], steps_between=1)
        for at, prompt in enumerate(prompts)
    ]
    assert [answer.token_ids for answer in got] == [found[0][0] for found in expected]
    workers = {worker["role"]: worker for worker in cluster.wait_until_idle()["workers"]}
    assert workers["decode"]["transfers"]["committed"] == len(prompts)
    exact = layout_of(TransformersRunner(model, EngineConfig(num_blocks=64)).spec)
    assert mismatch(layout_of(runner.spec), exact, "auto") == (
        "in group 'all', float8_e4m3fn cannot be converted to float32"
    )


def test_the_list_of_models_names_the_pages(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"http://{cluster.http}/v1/models", timeout=30) as found:
        (model,) = json.load(found)["data"]
    assert (model["weights"], model["kv_dtype"]) == ("exact", "fp8")
