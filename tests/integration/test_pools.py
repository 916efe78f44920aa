"""Pools of different engines in one cluster of real processes answer as one engine does."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.integration.cluster import Cluster, running_cluster
from tests.integration.test_engine_models import VOCAB_SIZE, Reference, load_reference, refer, save_tiny
from tests.support.asking import sampling
from tests.support.model_folders import backend
from tests.support.processes import command_line

pytestmark = [pytest.mark.first, pytest.mark.integration]

NUM_TOKENS = 24
NEAR_TIE = 0.05
"""Margin below which the decode pool's bfloat16 pages may decide otherwise than float32 ones; logits are about 1."""
PREFILL = '{"engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64}}'
DECODE = '{"engine": {"tensor_parallel": 2, "kv_dtype": "bfloat16", "max_num_seqs": 16, "num_blocks": 96}}'


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    prompts: list[list[int]]
    references: list[Reference]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", {"tie_word_embeddings": False, "max_position_embeddings": 1024}, folder)
    backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(folder / "tokenizer.json"))
    draw, reference = random.Random(59), load_reference(folder)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 17, 70, 150, 260)]
    with running_cluster(
        *("--model", str(folder)),
        engine_num_blocks="128",
        pools_prefill=PREFILL,
        pools_decode=DECODE,
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        yield Served(cluster, prompts, [refer(reference, prompt, NUM_TOKENS) for prompt in prompts])


def worker_of(cluster: Cluster, role: str) -> dict[str, Any]:
    (worker_id,) = cluster.ids(role)
    return cluster.worker(worker_id)


def test_pools_have_the_engines_that_are_configured(served: Served) -> None:
    prefill, decode = (worker_of(served.cluster, role) for role in ("prefill", "decode"))
    assert (prefill["computes"]["num_ranks"], decode["computes"]["num_ranks"]) == (1, 2)
    assert (prefill["computes"]["kv_dtype"], decode["computes"]["kv_dtype"]) == ("float32", "bfloat16")
    assert (prefill["blocks"]["total"], decode["blocks"]["total"]) == (128, 96)
    assert (prefill["chunk_tokens"], decode["chunk_tokens"]) == (64, 512)
    children = psutil.Process(decode["pid"]).children()
    assert ["spawn_main" in " ".join(command_line(child)) for child in children].count(True) == 1, "the other rank"


def test_the_status_says_in_what_the_engines_of_the_pools_differ(served: Served) -> None:
    assert served.cluster.client.status()["pools"]["decode"]["engine"] == [
        "kv_dtype=bfloat16",
        "max_num_batched_tokens=auto",
        "max_num_seqs=16",
        "num_blocks=96",
        "tensor_parallel=2",
    ]


def test_prompts_computed_by_one_rank_are_answered_by_two_as_by_one_engine(served: Served) -> None:
    cluster, num_same = served.cluster, 0
    for prompt, reference in zip(served.prompts, served.references, strict=True):
        answer = cluster.generate(token_ids=prompt, sampling=sampling(NUM_TOKENS))
        assert (answer.timing.mode, answer.timing.retries) == ("disaggregated", 0)
        num_same += is_same(answer.token_ids, reference)
    print(f"{num_same} of {len(served.prompts)} answers equal to the last token")
    assert num_same >= len(served.prompts) - 2, "too many near ties for a test that means something"
    cluster.wait_for(lambda status: num_committed(status) == len(served.prompts))
    cluster.wait_until_idle()


def num_committed(status: dict[str, Any]) -> int:
    """How many prompts' KV the decode worker has taken, as of its lease."""
    return sum(each["transfers"]["committed"] for each in status["workers"] if each["role"] == "decode")


def is_same(tokens: list[int], reference: Reference) -> bool:
    """Whether all tokens are equal; False when they part at a near tie. Anything else fails."""
    for step, (token, expected) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if token != expected:
            margin = reference.margins[step]
            assert margin <= NEAR_TIE, f"token {step} is {token}, generate says {expected} with a margin of {margin}"
            return False
    return True


def test_a_flip_between_them_is_refused_by_name(served: Served) -> None:
    cluster = served.cluster
    worker = worker_of(cluster, "prefill")["id"]
    command = [sys.executable, "-P", "-m", "deploy.cli", "role", worker, "decode", "--address", cluster.grpc]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert (
        f"{worker} cannot become a decode worker: it keeps its engine, and the pools' engines differ in kv_dtype, "
        "max_num_batched_tokens, max_num_seqs, num_blocks, tensor_parallel; change the sizes of both pools"
    ) in " ".join(refused.stderr.split())
    assert worker_of(cluster, "prefill")["id"] == worker
