"""A cluster of real processes serves models with states and with windows, and transfers what they need and no more.

The states of recurrent layers are one row per sequence; a window's layers need the blocks of the window alone. Every
answer is held against transformers' `generate`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.blocks import num_blocks_for
from engine.core.runner import KVSpec
from engine.model.asking import ask
from tests.integration.cluster import Answer, running_cluster
from tests.integration.test_engine_models import VOCAB_SIZE, Reference, load_reference, refer, same_up_to_near_ties
from tests.integration.test_families import prompts, save_untied
from tests.integration.test_families_cluster import (
    NUM_TOKENS,
    Served,
    require_answers_through_a_drain,
    require_answers_through_a_kill,
)
from tests.support.asking import exposition, metric, sample, sampling
from tests.support.families import OFTEN, RECURRENT
from tests.support.model_folders import backend
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

KINDS = ("qwen3_next", "mamba2", "gemma3_text")
"""A hybrid, a model without attention, and one with windows."""
BLOCK = 16
GRID = 32
"""Tokens between two snapshots, and in a step: computing many tokens takes longer than pulling their blocks."""
NUM_ANSWER = 300
RENEW_S = 0.3
"""Time between two reports of a worker."""
COUNTED = "baton_kv_transfer_bytes_total"


@dataclass(frozen=True, kw_only=True)
class Measured(Served):
    """One of them, with what its tests compare."""

    folder: Path
    spec: KVSpec

    def is_right(self, prompt: list[int], answer: Answer) -> bool:
        """Returns whether an answer equals that of `generate`; False: they differ from a near tie on. Others fail."""
        return same_up_to_near_ties(answer.token_ids, refer(load_reference(self.folder), prompt, len(answer.token_ids)))

    def ask(self, prompt: list[int], num_tokens: int) -> tuple[Answer, dict[tuple[str, str], int]]:
        """Returns an answer, and the bytes of its transfers by direction and worker, once the router knows both."""
        before = self._settled()
        answer = self.cluster.generate(token_ids=prompt, sampling=sampling(num_tokens))
        assert (answer.timing.mode, answer.timing.retries) == ("disaggregated", 0)
        arrived = ("received", answer.timing.decode_worker)
        wait_until(lambda: self._bytes()[arrived] > before.get(arrived, 0), seen=self._bytes)
        self.cluster.wait_until_idle()
        return answer, {name: number - before.get(name, 0) for name, number in self._settled().items()}

    def _settled(self) -> dict[tuple[str, str], int]:
        """Returns the bytes once leases have reported the same ones for a while."""
        found = [self._bytes()]
        while len(found) < 5 or any(each != found[-1] for each in found[-5:]):
            time.sleep(RENEW_S)
            found.append(self._bytes())
        return found[-1]

    def _bytes(self) -> dict[tuple[str, str], int]:
        text = exposition(self.cluster)
        workers = [worker["id"] for worker in self.cluster.client.status()["workers"]]
        return {
            (direction, worker): int(sample(text, COUNTED, f'direction="{direction}"', f'worker="{worker}"'))
            for direction in ("sent", "received")
            for worker in workers
        }

    def num_bytes(self, num_tokens: int, num_held: int = 0) -> int:
        """Bytes of the blocks and the states of a prefix, except the blocks of its first `num_held` tokens."""
        counts = [
            num_blocks_for(num_tokens, BLOCK) - max(group.first_block(num_tokens), num_held // BLOCK)
            for group in self.spec.groups
        ]
        blocks = zip(counts, self.spec.groups, strict=True)
        return self.spec.state_bytes + sum(n * len(group.layers) * group.row_bytes for n, group in blocks)

    def wait_until_known(self, before: float) -> None:
        """Until the router knows of more resume points than before."""
        wait_until(lambda: metric(self.cluster, "baton_mirror_blocks") > before)


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp(request.param)
    save_untied(request.param, (OFTEN | RECURRENT)[request.param] | {"max_position_embeddings": 2048}, folder)
    backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(folder / "tokenizer.json"))
    reference = load_reference(folder)
    references = [refer(reference, prompt, NUM_TOKENS) for prompt in prompts()]
    spec = ask(AutoConfig.from_pretrained(folder, trust_remote_code=False)).shape.cache_spec(BLOCK, "float32", 1)
    with running_cluster(
        *("--model", str(folder)),
        cluster_decode="2",
        engine_max_num_batched_tokens=str(GRID),
        engine_num_blocks="640",
        engine_runner="transformers",
        engine_snapshot_tokens=str(GRID),
        index_renew_s=str(RENEW_S),
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        yield Measured(cluster=cluster, references=references, folder=folder, spec=spec)


def drawn(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def test_the_next_turn_pulls_what_decoding_left_and_one_row(served: Measured) -> None:
    """The first one, as the router has not yet learned how quickly a tiny model computes what it could pull."""
    prompt = drawn(2, 108)
    known = metric(served.cluster, "baton_mirror_blocks")
    first, _ = served.ask(prompt, NUM_ANSWER)
    served.wait_until_known(known + 3)
    so_far = prompt + first.token_ids
    second_prompt = so_far + drawn(3, 40)
    pulled = metric(served.cluster, "baton_kv_pulled_tokens_total")
    second, moved = served.ask(second_prompt, 12)
    assert served.is_right(second_prompt, second)
    num_cached = second.usage.cached_tokens
    print(f"{num_cached} of {len(so_far)} tokens of the turn before were cached")
    assert num_cached == (len(so_far) - 1) // BLOCK * BLOCK
    assert num_cached >= len(so_far) - 2 * GRID
    assert moved["received", second.timing.prefill_worker] == served.num_bytes(num_cached, 96)
    assert metric(served.cluster, "baton_kv_pulled_tokens_total") == pulled + num_cached - 96
    assert second.timing.decode_worker == first.timing.decode_worker, "the one that has the most of it"
    assert moved["received", second.timing.decode_worker] == served.num_bytes(len(second_prompt), num_cached)


def test_answers_are_those_of_transformers(served: Measured) -> None:
    same = []
    for prompt, reference in zip(prompts(), served.references, strict=True):
        got = served.cluster.generate(token_ids=prompt, sampling=sampling(12))
        assert got.timing.mode == "disaggregated"
        same.append(same_up_to_near_ties(got.token_ids, Reference(reference.tokens[:12], reference.margins[:12])))
    assert sum(same) >= 4


def test_a_transfer_is_the_missing_blocks_and_one_row(served: Measured) -> None:
    """The same prompt, again and again: every decode worker takes all of it once, and the last block from then on."""
    prompt, have = drawn(1, 204), set[str]()
    for _ in range(4):
        answer, moved = served.ask(prompt, 20)
        assert served.is_right(prompt, answer)
        held = 192 if answer.timing.decode_worker in have else 0
        expected = served.num_bytes(204, held)
        assert moved["received", answer.timing.decode_worker] == expected
        assert sum(moved.values()) == 2 * expected, "nothing else was sent or received"
        have.add(answer.timing.decode_worker)
    assert answer.usage.cached_tokens == 192, "of the prefill worker"


def test_a_common_beginning_is_computed_twice_at_most(served: Measured) -> None:
    """The second prompt shows where they part, and its state is kept there."""
    common = drawn(4, 250)
    cached = []
    for number in range(4):
        prompt = common + drawn(5 + number, 60)
        answer, _ = served.ask(prompt, 4)
        assert served.is_right(prompt, answer)
        cached.append(answer.usage.cached_tokens)
    print(f"cached tokens of prompts with {len(common)} common ones: {cached}")
    assert cached[0] == 0
    assert all(number >= len(common) - GRID - BLOCK for number in cached[2:])
    assert cached[2:] == [240, 240]


def test_answers_go_on_with_their_kv_as_a_worker_drains(served: Measured) -> None:
    require_answers_through_a_drain(served)


def test_answers_go_on_as_a_worker_dies(served: Measured) -> None:
    require_answers_through_a_kill(served)
    served.cluster.wait_until_idle()
