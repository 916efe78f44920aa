"""Helm releases of models behind one release of routers: clients of one notice nothing of what is done to another."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kube.release import NEEDS_COMPILER, POOLS, Release, kube_cluster, load_on
from tests.kube.test_cluster import SETTINGS

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    NEEDS_COMPILER,
]
WAKE_WAIT_S = 240
ROUTERS = ("--set=parts.model=false", "--set=router.replicas=2", f"--set=config.router.wake_wait_s={WAKE_WAIT_S}")
IDLE_S = 20
SLEEPS = (
    "--set=config.autoscale.enabled=true",
    "--set=config.autoscale.min_prefill=0",
    "--set=config.autoscale.min_decode=0",
    "--set=config.autoscale.max_workers=2",
    f"--set=config.autoscale.idle_s={IDLE_S}",
    "--set=controller.persistence.enabled=true",
    "--set=pools.prefill.minReplicas=0",
    "--set=pools.decode.minReplicas=0",
)
NUM_HELD = 20


@pytest.fixture
def door(tmp_path: Path, model_dir: Path) -> Iterator[Release]:
    """Two routers and Redis, which serve no model yet."""
    with kube_cluster(4, tmp_path, model_dir.parents[1], *SETTINGS) as release:
        release.install(*ROUTERS)
        yield release


def test_models_come_are_upgraded_and_go_and_the_one_beside_them_serves_on(door: Release) -> None:
    """Three releases. No request to the model that stays fails, whatever is done to the other one."""
    qwen, llama = door.of_model("qwen"), door.of_model("llama", "--set=config.engine.batch_invariant=true")
    qwen.install()
    door.wait_for(lambda: names(door) == ["qwen"])
    with load_on(door.grpc, "qwen") as load:
        llama.install()
        door.wait_for(lambda: names(door) == ["llama", "qwen"])
        for name in ("qwen", "llama"):
            assert ask(door, name).usage.completion_tokens == 5
        assert [shown(door, name)["release"] for name in ("qwen", "llama")] == [qwen.name, llama.name]

        before = {pod["metadata"]["uid"] for pod in llama.node_pods()}
        llama.upgrade("--set", "image.worker.tag=another")
        for role in POOLS:
            llama.wait_for_pool(role, 1)
        assert not before & {pod["metadata"]["uid"] for pod in llama.node_pods()}
        assert ask(door, "llama").usage.completion_tokens == 5

        llama.helm("uninstall", llama.name)
        door.wait_for(lambda: not any(llama.pods(part) for part in (*POOLS, "controller", "head")))
        door.wait_for(lambda: [is_unknown(door, "llama") for _ in range(6)] == [True] * 6)  # to both routers
        assert names(door) == ["qwen"]
        num_served = load.num_served
        door.wait_for(lambda: load.num_served > num_served + 10)
        assert load.failures == [], f"{load.failures}\n{door.picture()}"
    print(f"{load.num_served} requests to the model that stayed, none failed")


def test_a_model_sleeps_without_pods_and_held_requests_wake_it(door: Release) -> None:
    model = door.of_model("qwen", *SLEEPS)
    model.install()
    door.wait_for(lambda: shown(door, "qwen").get("state") == "asleep")
    door.wait_for(lambda: not model.node_pods())
    assert names(door) == ["qwen"], "a model that sleeps is listed"
    with concurrent.futures.ThreadPoolExecutor(NUM_HELD) as pool:
        answers = [pool.submit(ask, door, "qwen") for _ in range(NUM_HELD)]
        door.wait_for(lambda: shown(door, "qwen")["state"] == "waking")
        assert [answer.result().usage.completion_tokens for answer in answers] == [5] * NUM_HELD
    assert {role: len(model.pods(role)) for role in POOLS} == {"prefill": 1, "decode": 1}, "it was woken once"
    assert "woke in" in door.baton("status")
    door.wait_for(lambda: not model.node_pods())
    door.wait_for(lambda: shown(door, "qwen")["state"] == "asleep")
    print(f"{shown(door, 'qwen')['wake_s']:.0f} s to wake")


def names(door: Release) -> list[str]:
    """Returns the names of the models that the endpoint lists."""
    with client(door) as served:
        return sorted(model.id for model in served.models.list())


def ask(door: Release, model: str) -> Any:
    with client(door) as served:
        return served.completions.create(model=model, prompt="The capital of France is", max_tokens=5)


def is_unknown(door: Release, model: str) -> bool:
    """True if the model is refused as one that does not exist, and not because it has no workers."""
    try:
        ask(door, model)
    except openai.NotFoundError:
        return True
    except openai.InternalServerError:
        pass
    return False


def client(door: Release) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{door.http}/v1", api_key="none", max_retries=0, timeout=WAKE_WAIT_S + 60)


def shown(door: Release, model: str) -> dict[str, Any]:
    """Returns a model's entry in `baton status`; empty if there is none."""
    return next((each for each in door.baton_status()["models"] if each["id"] == model), {})
