"""A cluster of int8 weights and int8 pages answers as one engine with both, and takes no KV from or to any other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.config import ClusterConfig, Config, EngineConfig, IndexConfig, ModelConfig, load
from deploy.embedded_redis import EmbeddedRedis
from deploy.models import cache_dir, resolve
from deploy.processes import module_command, tied
from engine.runners import make_runner
from tests.integration.cluster import STOP_TIMEOUT_S, Answer, Cluster, free_port, running_cluster
from tests.integration.test_doctor import doctor
from tests.integration.test_engine_models import answers, engine_of
from tests.support.asking import prompt_of, sampling
from tests.support.builders import sequence_spec
from tests.support.members import secret_file
from tests.support.waiting import wait_until

pytestmark = pytest.mark.full
NUM_TOKENS = 12
LENGTHS = (1, 16, 33, 150, 600)
"""Tokens of the prompts: less than a block, one block, not whole ones, two chunks."""
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
BESIDE = "decode-beside"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis(port=free_port()) as redis:
        yield redis.url


@pytest.fixture(scope="module")
def cluster(redis_url: str) -> Iterator[Cluster]:
    with running_cluster(
        model_weights="int8g",
        engine_kv_dtype="int8",
        engine_runner="native",
        engine_num_blocks="512",
        index_redis_url=redis_url,
        cluster_secret=secret_file(),
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000}}',
    ) as cluster:
        yield cluster


def engine_config(kv_dtype: str) -> EngineConfig:
    return EngineConfig(runner="native", kv_dtype=kv_dtype, num_blocks=512)


@contextlib.contextmanager
def decode_worker_beside(redis_url: str, weights: str, kv_dtype: str) -> Iterator[None]:
    """A decode worker of other settings in the cluster's Redis; the block is entered once it is ready."""
    model = resolve(ModelConfig(), cache_dir(load().cluster))
    config = Config(
        model=ModelConfig(
            path=str(model.path), served_name=model.served_name, revision=model.revision, device="cpu", weights=weights
        ),
        engine=engine_config(kv_dtype),
        index=IndexConfig(redis_url=redis_url),
        cluster=ClusterConfig(secret=secret_file()),
    )
    ready, tell = os.pipe()
    process = subprocess.Popen(
        tied(module_command("worker", "decode", BESIDE, "127.0.0.1", "--ready-fd", str(tell))),
        env=os.environ | {"BATON_CONFIG_JSON": config.to_json()},
        pass_fds=[tell],
    )
    try:
        os.close(tell)
        with os.fdopen(ready) as reports:
            assert "address" in json.loads(reports.readline())
        yield
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def ask_all(cluster: Cluster, prompts: Sequence[list[int]], **more: Any) -> list[Answer]:
    """At the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = sampling(NUM_TOKENS, **more)
        return list(pool.map(lambda prompt: cluster.generate(token_ids=prompt, sampling=asked), prompts))


def alone(folder: Path, kv_dtype: str, prompts: Sequence[list[int]], **more: Any) -> list[list[int]]:
    """What an engine alone answers."""
    config = engine_config(kv_dtype)
    model = ModelConfig(path=str(folder), device="cpu", weights="int8g")
    engine = engine_of(make_runner(model, config, cache_dir(load().cluster)), config)
    numbered = enumerate(prompts)
    specs = [sequence_spec(prompt, f"{number}", max_tokens=NUM_TOKENS, **more) for number, prompt in numbered]
    return answers(engine, specs, steps_between=1)[0]


def test_streams_are_those_of_an_engine_alone(cluster: Cluster, model_dir: Path) -> None:
    prompts = [prompt_of(number, length) for number, length in enumerate(LENGTHS)]
    for more in ({}, SEEDED):
        got = ask_all(cluster, prompts, **more)
        assert {(answer.timing.mode, answer.timing.retries) for answer in got} == {("disaggregated", 0)}
        assert [answer.token_ids for answer in got] == alone(model_dir, "int8", prompts, **more)
    workers = {worker["role"]: worker for worker in cluster.wait_until_idle()["workers"]}
    assert {role: worker["engine"] for role, worker in workers.items()} == {"prefill": "native", "decode": "native"}
    assert workers["decode"]["transfers"]["committed"] == 2 * len(prompts)


def test_the_list_of_models_names_both(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"http://{cluster.http}/v1/models", timeout=30) as found:
        (model,) = json.load(found)["data"]
    assert (model["weights"], model["kv_dtype"]) == ("int8g", "int8")


@pytest.mark.chaos
def test_pages_of_another_type_are_refused_by_name_and_no_token_is_wrong(
    cluster: Cluster, model_dir: Path, redis_url: str
) -> None:
    """The router may choose the worker, since its model is the same. Its own pages would give other tokens."""
    drawn = itertools.count(100)

    def some_were_refused() -> bool:
        prompts = [prompt_of(next(drawn), 40) for _ in range(4)]
        got = ask_all(cluster, prompts)
        assert [answer.token_ids for answer in got] == alone(model_dir, "int8", prompts)
        assert {answer.timing.decode_worker for answer in got} == set(cluster.ids("decode")) - {BESIDE}
        return any(answer.timing.retries for answer in got)

    with decode_worker_beside(redis_url, "int8g", "float32"):
        cluster.wait_for(lambda status: BESIDE in {w["id"] for w in status["workers"] if w["state"] == "ready"})
        wait_until(some_were_refused, PATIENCE_S, seen=lambda: cluster.log)
    assert f"worker {BESIDE} has KV of kind" in cluster.log
    assert "in group 'all', int8 cannot be converted to float32" in cluster.log


@pytest.mark.chaos
def test_a_worker_of_other_weights_is_another_models(cluster: Cluster, redis_url: str) -> None:
    with decode_worker_beside(redis_url, "exact", "int8"):
        _, checks = doctor(cluster)
        assert "2 of them in one Redis" in checks["model of the workers"]["found"]
        got = ask_all(cluster, [prompt_of(number, 40) for number in range(200, 204)])
        assert {(answer.timing.decode_worker, answer.timing.retries) for answer in got} == {
            (cluster.ids("decode")[0], 0)
        }
        assert BESIDE not in {worker["id"] for worker in cluster.client.status()["workers"]}
