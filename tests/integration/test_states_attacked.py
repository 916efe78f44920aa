"""Workers of models with states: in every mode, of unlike ranks, with faults, and with far too little memory.

Real processes without a controller, of whose engines one test or another has its own settings. Every answer is held
against transformers' `generate`, or against an engine alone if its pages are rounded.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import EngineConfig, ModelConfig, RouterConfig, SloClassConfig, TestingConfig, TransferConfig
from baton.errors import ModelLoadError
from baton.v1 import worker_pb2
from engine.runners import make_runner
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Answer, is_idle
from tests.integration.test_engine_models import (
    Reference,
    answers,
    load_reference,
    make_engine,
    make_spec,
    refer,
    same_up_to_near_ties,
)
from tests.integration.test_families import save_untied
from tests.integration.test_states_cluster import drawn
from tests.integration.test_tensor_parallel import run_real_worker
from tests.support.asking import metric, sampling
from tests.support.families import OFTEN, RECURRENT
from tests.support.load import Stream
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

SLO = {"default": SloClassConfig(ttft_ms=600_000, itl_ms=600_000)}
LOYAL = {"default": replace(SLO["default"], affinity_weight=1e6)}
"""A conversation stays with the worker that has it, whichever one decodes more quickly."""
AGGREGATED = RouterConfig(mode="aggregated", slo_classes=SLO)
DISAGGREGATED = RouterConfig(mode="disaggregated", slo_classes=SLO)
TRANSFER = TransferConfig(pull_timeout_s=30.0)
BLOCK = 16
GRID = 32
ENGINE = EngineConfig(num_blocks=640, runner="transformers", snapshot_tokens=GRID, max_num_batched_tokens=GRID)
MAX_LEN = 2400


@dataclass
class Workers:
    """Workers of one tiny model behind a router."""

    fleet: Fleet
    folder: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def add(self, role: Role, engine: EngineConfig = ENGINE, faults: str = "", **transfer: Any) -> str:
        """Starts a worker and returns its id once it is ready."""
        config = self.fleet.config
        config = replace(
            config,
            model=replace(config.model, path=str(self.folder), device="cpu"),
            testing=TestingConfig(faults=faults),
            transfer=replace(config.transfer, **transfer),
        )
        worker_id = f"worker-{next(self.numbers)}"
        process = multiprocessing.get_context("spawn").Process(
            target=run_real_worker, args=(role, worker_id, replace(config, engine=engine).to_json(), os.getpid())
        )
        process.start()
        self.fleet.workers[worker_id] = process
        self.fleet.wait_for(worker_id)
        return worker_id

    @property
    def reference(self) -> Any:
        return load_reference(self.folder)

    def ask(self, prompt: Sequence[int], num_tokens: int, name: str = "") -> Answer:
        return self.fleet.routers[0].generate(token_ids=list(prompt), sampling=sampling(num_tokens), request_id=name)

    def is_right(self, prompt: list[int], answer: Answer) -> bool:
        return same_up_to_near_ties(answer.token_ids, refer(self.reference, prompt, len(answer.token_ids)))

    def stream(self, prompt: list[int], num_tokens: int) -> Stream:
        return Stream(inference=self.fleet.inference, prompt=prompt, max_tokens=num_tokens, timeout_s=300).start()

    def computed(self) -> int:
        return sum(worker["computed_tokens"] for worker in self.fleet.client.status()["workers"])

    def wait_until_idle(self) -> list[dict[str, Any]]:
        """All workers are idle and their self checks are well. Returns their status."""
        found: list[dict[str, Any]] = self.fleet.routers[0].wait_until_idle()["workers"]
        rows = [worker["state_rows"] for worker in found if worker.get("state_rows")]
        assert all(each["in_use"] == 0 and each["free"] + each["cached"] == each["total"] for each in rows)
        return found


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        save_untied(kind, (OFTEN | RECURRENT)[kind] | {"max_position_embeddings": MAX_LEN}, folder)
        return folder

    return saved


@contextlib.contextmanager
def serving(folder: Path, router: RouterConfig) -> Iterator[Workers]:
    with running_fleet(TRANSFER, router, lease_s=15.0) as fleet:
        yield Workers(fleet, folder)
        fleet.clear()


# -- a long answer, and the turn after it ------------------------------------------------------------------------------

NUM_LONG = 2_000


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba2", "gemma3_text"])
def test_a_long_answer_drains_for_a_few_tokens_and_its_next_turn_finds_it(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    """Snapshots have the default distance, and one more follows each sequence from block to block."""
    prompt, max_tokens = drawn(11, 60), NUM_LONG + 200
    sparse = replace(ENGINE, snapshot_tokens=1024)
    with serving(folder_of(kind), AGGREGATED) as workers:
        first = workers.add(Role.DECODE, sparse)
        stream = workers.stream(prompt, max_tokens)
        successor = workers.add(Role.DECODE, sparse)
        wait_until(lambda: len(stream.tokens) >= NUM_LONG, 200.0)
        with workers.fleet.control(first) as worker:
            assert worker.Drain(worker_pb2.DrainRequest(timeout_s=30)).num_left == 0
        num_before = len(stream.tokens)
        assert stream.wait().error is None
        assert num_before < max_tokens, "it was to be moved in the middle"
        assert (stream.timing.decode_worker, stream.retries) == (successor, 0)
        num_known = len(prompt) + max_tokens - 1
        wait_until(lambda: workers.computed() >= num_known, seen=workers.computed)
        num_again = workers.computed() - num_known
        print(f"{kind}: drained after {num_before} tokens; {num_again} tokens computed again")
        assert num_again < 0.2 * (len(prompt) + NUM_LONG)
        assert num_again <= BLOCK
        same_up_to_near_ties(stream.tokens, refer(workers.reference, prompt, max_tokens))

        so_far = prompt + stream.tokens
        workers.wait_until_idle()
        following = so_far + drawn(12, 40)
        answer = workers.ask(following, 8)
        print(f"{kind}: {answer.usage.cached_tokens} of {len(so_far)} tokens cached in the next turn")
        assert answer.timing.decode_worker == successor
        assert answer.usage.cached_tokens == (len(so_far) - 1) // BLOCK * BLOCK
        assert workers.is_right(following, answer)
        workers.wait_until_idle()


@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3_text"])
def test_a_conversation_stays_with_the_worker_that_has_its_resume_points(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    """Each computes the prompts that it decodes: of three workers, a conversation's turns go to the first one's.

    Where a prompt leaves the conversation, the router expects what can be continued: no block behind the last state.
    """
    with serving(folder_of(kind), replace(AGGREGATED, slo_classes=LOYAL)) as workers:
        for _ in range(3):
            workers.add(Role.DECODE)
        for seed in range(3):
            prompt, owner, num_cached = drawn(20 + seed, 100), "", 0
            for turn in range(3):
                known = metric(workers.fleet.routers[0], "baton_mirror_blocks")
                name = f"{seed}-{turn}"
                answer = workers.ask(prompt, 100, name)
                assert workers.is_right(prompt, answer)
                (decision,) = workers.fleet.client.explain(name)
                found = {each.worker_id: each.num_cached_tokens for each in decision.options}
                print(f"{kind}, turn {turn}: {answer.usage.cached_tokens} cached tokens, by the index {found}")
                assert {worker: number for worker, number in found.items() if number} == (
                    {owner: num_cached} if turn else {}
                )
                assert answer.usage.cached_tokens == num_cached
                assert owner in ("", answer.timing.decode_worker)
                owner, prompt = answer.timing.decode_worker, prompt + answer.token_ids
                num_cached = (len(prompt) - 1) // BLOCK * BLOCK
                assert num_cached >= len(prompt) - 2 * GRID
                prompt += drawn(30 + seed + turn, 30)
                wait_until(lambda: metric(workers.fleet.routers[0], "baton_mirror_blocks") > known)  # noqa: B023
                workers.wait_until_idle()
        branch = prompt[:90] + drawn(29, 40)
        answer = workers.ask(branch, 4, "branch")
        (decision,) = workers.fleet.client.explain("branch")
        found = {each.worker_id: each.num_cached_tokens for each in decision.options}
        print(f"{kind}, a branch: {answer.usage.cached_tokens} cached tokens, by the index {found}")
        assert found[owner] == answer.usage.cached_tokens == (64 if kind == "qwen3_next" else 80)
        assert workers.is_right(branch, answer)
        assert metric(workers.fleet.routers[0], "baton_kv_transfers_total") == 0


# -- unlike ranks and faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid"])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_workers_of_unlike_ranks_exchange_states(
    kind: str, ranks: tuple[int, int], folder_of: Callable[[str], Path]
) -> None:
    """Two ranks of qwen3_next divide the heads; those of granitemoehybrid have all of them."""
    prompt = drawn(41, 108)
    with serving(folder_of(kind), DISAGGREGATED) as workers:
        for role, number in zip(Role, ranks, strict=True):
            workers.add(role, replace(ENGINE, tensor_parallel=number))
        known = metric(workers.fleet.routers[0], "baton_mirror_blocks")
        first = workers.ask(prompt, 300)
        same = [workers.is_right(prompt, first)]
        wait_until(lambda: metric(workers.fleet.routers[0], "baton_mirror_blocks") >= known + 6)
        following = prompt + first.token_ids + drawn(42, 40)
        second = workers.ask(following, 12)
        same.append(workers.is_right(following, second))
        same += [workers.is_right(each, workers.ask(each, 12)) for each in (drawn(43, 61), drawn(44, 130))]
        assert (second.timing.mode, second.timing.retries) == ("disaggregated", 0)
        assert second.usage.cached_tokens == 400, "pulled from the decode worker"
        assert sum(same) >= 3
        text = {worker["role"]: worker for worker in workers.wait_until_idle()}
        assert [text[role]["computes"]["num_ranks"] for role in Role] == list(ranks)
        assert text["prefill"]["transfers"]["failed"] == text["decode"]["transfers"]["failed"] == 0


@pytest.mark.parametrize(
    ("kind", "fault", "checksum"),
    [
        ("mamba2", "corrupt_chunk=3", "full"),
        ("mamba2", "drop_chunk=3", "full"),
        ("mamba2", "drop_chunk=3", "off"),
        ("qwen3_next", "corrupt_chunk=5", "full"),
    ],
)
def test_a_spoiled_state_is_detected_and_sent_again(
    kind: str, fault: str, checksum: str, folder_of: Callable[[str], Path]
) -> None:
    """All chunks of mamba2 are states. Without checksums the answers are wrong, which shows what is detected."""
    asked = [drawn(50 + number, 40 + number) for number in range(8)]
    with serving(folder_of(kind), DISAGGREGATED) as workers:
        for role in Role:
            workers.add(role, faults=fault, checksum=checksum)
        found = [workers.ask(prompt, 12) for prompt in asked]
        expected = [refer(workers.reference, prompt, 12) for prompt in asked]
        num_same = sum(answer.token_ids == reference.tokens for answer, reference in zip(found, expected, strict=True))
        retries = sum(answer.timing.retries for answer in found)
        print(f"{kind}, {fault}, checksum {checksum}: {num_same} of {len(asked)} right, {retries} retries")
        workers.wait_until_idle()
        if checksum == "off":
            assert num_same <= 5
            assert not retries
        else:
            assert all(map(same_up_to_near_ties, (answer.token_ids for answer in found), expected))
            assert metric(workers.fleet.routers[0], "baton_retries_total", 'error="TransferCorrupted"') == retries > 0


# -- little memory, and odd settings -----------------------------------------------------------------------------------

ODD: dict[str, dict[str, Any]] = {
    "few_blocks": {"num_blocks": 24, "snapshot_tokens": 16},
    "few_rows": {"num_blocks": 96, "snapshot_tokens": 10**6, "max_num_seqs": 8},
    "one_sequence": {"max_num_seqs": 1},
    "planned_ahead": {"snapshot_tokens": 1, "plan_ahead": True, "num_blocks": 64},
    "large_blocks": {"block_size": 32, "num_blocks": 48},
    "small_share": {"num_blocks": 0, "kv_cache_gib": 0.0008},
}
COMMON = 60
NUM_ODD = 40


def odd_prompts() -> list[list[int]]:
    """Prompts with a common beginning, one that repeats itself, and long ones."""
    tails = [drawn(60 + number, 5 + 9 * number) for number in range(6)]
    return [*[drawn(59, COMMON) + tail for tail in tails], drawn(58, 7) * 12, drawn(57, 300), drawn(57, 290)]


@pytest.fixture(scope="module")
def expected_of(folder_of: Callable[[str], Path]) -> Callable[[str], list[Reference]]:
    @cache
    def expected(kind: str) -> list[Reference]:
        reference = load_reference(folder_of(kind))
        return [refer(reference, prompt, NUM_ODD) for prompt in odd_prompts()]

    return expected


@pytest.fixture(scope="module", params=["qwen3_next", "mamba2"])
def odd(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[tuple[str, Workers]]:
    with serving(folder_of(request.param), DISAGGREGATED) as workers:
        yield request.param, workers


@pytest.mark.parametrize("name", ODD)
def test_answers_are_right_however_little_fits(
    name: str, odd: tuple[str, Workers], expected_of: Callable[[str], list[Reference]]
) -> None:
    """30 clients ask at a time; one in four hangs up."""
    kind, workers = odd
    engine = replace(ENGINE, **{"max_num_batched_tokens": 64} | ODD[name])
    for role in (Role.PREFILL, Role.DECODE, Role.DECODE):
        workers.add(role, engine)
    asked, expected, draw = odd_prompts(), expected_of(kind), random.Random(name)

    def follow(number: int) -> list[bool]:
        same = []
        for turn in range(4):
            which = draw.randrange(len(asked))
            stream = workers.stream(asked[which], NUM_ODD)
            if (number + turn) % 4 == 0:
                wait_until(lambda: len(stream.tokens) >= 5 or stream.is_over, 120.0)  # noqa: B023
                stream.cancel()
                stream.wait()
            else:
                assert stream.wait().error is None, stream.error
                same.append(same_up_to_near_ties(stream.tokens, expected[which]))
        return same

    with ThreadPoolExecutor(30) as pool:
        same = [each for found in pool.map(follow, range(30)) for each in found]
    found = workers.wait_until_idle()
    print(
        f"{kind}, {name}: {sum(same)} of {len(same)} equal; preemptions {[w['preemptions'] for w in found]}, "
        f"failed transfers {[w['transfers']['failed'] for w in found]}, rows {[w['state_rows'] for w in found][:1]}, "
        f"blocks {[w['blocks']['total'] for w in found][:1]}"
    )
    assert sum(same) >= 0.9 * len(same)
    workers.fleet.clear()
    wait_until(lambda: not workers.fleet.client.status()["workers"])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_rounded_pages_answer_as_an_engine_alone(kv_dtype: str, folder_of: Callable[[str], Path]) -> None:
    engine = replace(ENGINE, kv_dtype=kv_dtype)
    asked = [drawn(70 + number, 20 + 50 * number) for number in range(4)]
    alone = make_engine(folder_of("qwen3_next"), engine)
    expected = [answers(alone, [make_spec(f"{i}", each, 12, ignore_eos=True)], 0)[0][0] for i, each in enumerate(asked)]
    with serving(folder_of("qwen3_next"), DISAGGREGATED) as workers:
        for role in Role:
            workers.add(role, engine)
        found = [workers.ask(prompt, 12).token_ids for prompt in asked]
        (kept,) = {worker["computes"]["kv_dtype"] for worker in workers.wait_until_idle()}
        print(f"{kv_dtype} ({kept}): {sum(map(list.__eq__, found, expected))} of {len(asked)} equal")
        assert found == expected
        assert all(map(is_idle, workers.wait_until_idle()))


@pytest.mark.parametrize(("kind", "draft"), [("qwen3_next", "gemma3_text"), ("gemma3_text", "mamba2")])
def test_a_draft_model_is_refused_if_either_model_has_states(
    kind: str, draft: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = replace(ENGINE, draft_model=str(folder_of(draft)))
    with pytest.raises(ModelLoadError, match="has recurrent state, which cannot be rolled back after a rejected draft"):
        make_runner(ModelConfig(path=str(folder_of(kind)), device="cpu"), engine, tmp_path)
