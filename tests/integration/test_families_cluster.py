"""A cluster of real processes serves a model of each kind: disaggregated, and as a decode worker leaves or dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from tests.integration.cluster import Cluster, running_cluster
from tests.integration.test_engine_models import (
    VOCAB_SIZE,
    Reference,
    load_reference,
    refer,
    same_up_to_near_ties,
    save_tiny,
)
from tests.integration.test_families import prompts
from tests.support.asking import metric, sampling
from tests.support.families import KINDS
from tests.support.load import Stream
from tests.support.model_folders import backend
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]
NUM_TOKENS = 300
NUM_BEFORE = 20
"""Tokens of each answer before a worker leaves or dies."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A cluster with two decode workers, and the long answers of transformers."""

    cluster: Cluster
    references: list[Reference]
    prompts: list[list[int]] = field(default_factory=prompts)
    num_tokens: int = NUM_TOKENS


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, {"tie_word_embeddings": False} | KINDS[request.param], folder)
    backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(folder / "tokenizer.json"))
    reference = load_reference(folder)
    references = [refer(reference, prompt, NUM_TOKENS) for prompt in prompts()]
    with running_cluster(
        *("--model", str(folder)),
        cluster_decode="2",
        engine_num_blocks="128",
        engine_runner="transformers",
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        yield Served(cluster=cluster, references=references)


def is_whole(status: dict[str, Any]) -> bool:
    pool = status["pools"]["decode"]
    return len(status["workers"]) == 3 and bool(pool["desired"] == pool["ready"] == 2)


def answered(served: Served, end: Callable[[psutil.Process], None]) -> tuple[list[Stream], list[Stream]]:
    """Checks long answers, in the midst of which a decode worker ends. Returns those that it began, and the others."""
    cluster = served.cluster
    cluster.wait_for(is_whole)
    streams = [
        Stream(
            inference=cluster.inference,
            prompt=prompt,
            max_tokens=served.num_tokens,
            fields={"request_id": f"{end.__name__}-{number}"},
            timeout_s=240,
        ).start()
        for number, prompt in enumerate(served.prompts)
    ]
    wait_until(lambda: all(len(each.tokens) >= NUM_BEFORE for each in streams), 60.0, every_s=0.005)
    on = [cluster.client.explain(f"{end.__name__}-{number}")[0].decode_worker for number in range(len(streams))]
    leaver = max(on, key=on.count)
    end(psutil.Process(cluster.worker(leaver)["pid"]))
    most = max(len(each.tokens) for each in streams)
    same = list[bool]()
    for stream, reference in zip(streams, served.references, strict=True):
        assert stream.wait().error is None
        same.append(same_up_to_near_ties(stream.tokens, reference))
    print(f"{end.__name__}: {on.count(leaver)} of {len(on)} on {leaver}, after {most} tokens at most; same: {same}")
    assert most < served.num_tokens / 2, "the worker was to end in the midst of its answers"
    assert sum(same) >= 4
    begun = [stream for stream, worker in zip(streams, on, strict=True) if worker == leaver]
    assert leaver not in {stream.timing.decode_worker for stream in begun}
    return begun, [stream for stream in streams if stream not in begun]


def test_answers_are_those_of_transformers(served: Served) -> None:
    for prompt, reference in zip(prompts(), served.references, strict=True):
        got = served.cluster.generate(token_ids=prompt, sampling=sampling(12))
        assert got.timing.mode == "disaggregated"
        same_up_to_near_ties(got.token_ids, Reference(reference.tokens[:12], reference.margins[:12]))


def test_answers_go_on_with_their_kv_as_a_worker_drains(served: Served) -> None:
    require_answers_through_a_drain(served)


def test_answers_go_on_as_a_worker_dies(served: Served) -> None:
    require_answers_through_a_kill(served)


def require_answers_through_a_drain(served: Served) -> None:
    """Checks that answers of a decode worker that leaves migrate with their KV."""

    def migrations(pulled: str) -> float:
        return metric(served.cluster, "baton_migrations_total", f'pulled="{pulled}"')

    assert migrations("true") == 0
    begun, others = answered(served, psutil.Process.terminate)
    assert not any(stream.retries for stream in begun + others)
    assert (migrations("true"), migrations("false")) == (len(begun), 0)


def require_answers_through_a_kill(served: Served) -> None:
    """Checks that answers of a decode worker that is killed, and only these, are retried."""
    begun, others = answered(served, psutil.Process.kill)
    assert all(stream.retries for stream in begun)
    assert not any(stream.retries for stream in others)
