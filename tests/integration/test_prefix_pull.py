"""A conversation's next turn finds what the turn before left, wherever it is; and no KV transfer delays a first
token."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from engine.testing import expected_tokens
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Answer, Served, request
from tests.support.asking import held_by, metric, prompt_of, sampling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

BLOCK = 16
NUM_BLOCKS = 1024
SPLIT = RouterConfig(mode="disaggregated")
TWO_EACH = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
TOKEN_MS = 3.0
"""What computing a token takes. Computing a turn's 300 tokens takes longer than any pull, even on a busy machine:
placement may, rightly, do whatever it predicts to be quicker."""
PULL_TIMEOUT_S = 60.0
LEASE_S = 10.0
"""A worker that stands still for seconds stays a source of what it holds."""
PATIENT = TransferConfig(pull_timeout_s=PULL_TIMEOUT_S)


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


class Conversation:
    """Two turns of arithmetic: the second prompt is the first with its answer and something new."""

    def __init__(self, seed: int, num_prompt: int = 60, num_answer: int = 300, num_new: int = 80) -> None:
        self.first_prompt = prompt_of(seed, num_prompt)
        self.num_answer = num_answer
        self.answer = expected_tokens(self.first_prompt, num_answer)
        self.so_far = self.first_prompt + self.answer
        self.second_prompt = self.so_far + prompt_of(seed + 1, num_new)
        self.num_held = whole_blocks(len(self.so_far) - 1)
        """Of the second prompt, by the decode worker: the KV of a token is computed with the next one."""

    def first_turn(self, cluster: Served) -> Answer:
        with held_by(cluster) as num_tokens:
            answer = cluster.generate(token_ids=self.first_prompt, sampling=sampling(self.num_answer))
            assert answer.token_ids == self.answer
            num_tokens[answer.timing.decode_worker] = self.num_held
            if answer.timing.mode == "disaggregated":
                num_tokens[answer.timing.prefill_worker] = whole_blocks(len(self.first_prompt))
        return answer

    def second_turn(self, cluster: Served) -> Answer:
        answer = cluster.generate(token_ids=self.second_prompt, sampling=sampling(20))
        assert answer.token_ids == expected_tokens(self.second_prompt, 20)
        return answer


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(PATIENT, SPLIT, num_blocks=NUM_BLOCKS, lease_s=LEASE_S, token_ms=TOKEN_MS) as fleet:
        fleet.fill(Role.PREFILL, Role.DECODE, Role.DECODE)  # of two who compute, either may seem the quicker one
        yield fleet


def test_the_next_turn_finds_what_decoding_left(fleet: Fleet) -> None:
    """The prefill worker that computes the rest pulls the generated tokens' KV from the decode worker."""
    cluster = fleet.routers[0]
    conversation = Conversation(100)
    conversation.first_turn(cluster)
    before = metric(cluster, "baton_kv_pulled_tokens_total")
    second = conversation.second_turn(cluster)
    assert second.usage.cached_tokens == conversation.num_held
    assert (second.timing.mode, second.timing.retries) == ("disaggregated", 0)
    held_there = whole_blocks(len(conversation.first_prompt))
    cluster.wait_until_idle()
    wait_until(lambda: metric(cluster, "baton_kv_pulled_tokens_total") == before + conversation.num_held - held_there)
    third = conversation.second_turn(cluster)
    assert third.usage.cached_tokens == whole_blocks(len(conversation.second_prompt) - 1), "by the worker that pulled"


def test_the_source_dies_just_before_the_next_turn(fleet: Fleet) -> None:
    cluster = fleet.routers[0]
    conversation = Conversation(200)
    source = conversation.first_turn(cluster).timing.decode_worker
    fleet.remove(source, signal.SIGKILL)
    second = conversation.second_turn(cluster)
    assert second.timing.decode_worker != source
    assert second.usage.cached_tokens == whole_blocks(len(conversation.first_prompt)), "what the prefill worker held"
    cluster.wait_until_idle()
    fleet.fill(Role.DECODE)


def test_left_to_itself_the_next_turn_goes_where_the_conversation_is() -> None:
    """Split or not: it is computed where the most of it is, or what is missing there comes over."""
    with running_fleet(PATIENT, RouterConfig(), num_blocks=NUM_BLOCKS, lease_s=LEASE_S, token_ms=TOKEN_MS) as fleet:
        cluster = fleet.fill(*TWO_EACH)
        for seed in (120, 140):
            conversation = Conversation(seed)
            conversation.first_turn(cluster)
            assert conversation.second_turn(cluster).usage.cached_tokens == conversation.num_held
            cluster.wait_until_idle()


@pytest.fixture
def slow_fleet() -> Iterator[Fleet]:
    """Two workers that compute what they decode, and 3 s for each chunk that travels, of which the router learns with
    the first pull.

    A conversation stays with its owner, but for one reason: nobody computes a prompt beside a sequence that it decodes
    if somebody else can.
    """
    busy = SloClassConfig(affinity_weight=1e5, interference_weight=1e12)
    router = RouterConfig(mode="aggregated", slo_classes={"default": busy})
    settings: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "lease_s": LEASE_S, "step_ms": 4.0}
    with running_fleet(PATIENT, router, faults="link_delay_ms=3000", **settings) as fleet:
        fleet.fill(Role.DECODE, Role.DECODE)
        yield fleet


class Busy:
    """A stream that keeps the owner of a conversation busy, so that its next turn is placed elsewhere."""

    def __init__(self, cluster: Served, conversation: Conversation) -> None:
        self._prompt = conversation.so_far + prompt_of(7, 800)
        self._num_tokens = 1500
        self._messages = cluster.inference.Generate(
            request(token_ids=self._prompt, sampling=sampling(self._num_tokens)), timeout=240
        )
        self._tokens = list(next(self._messages).token_ids)

    def finish(self) -> Answer:
        messages = list(self._messages)
        tokens = self._tokens + [token_id for message in messages for token_id in message.token_ids]
        assert tokens == expected_tokens(self._prompt, self._num_tokens)
        return Answer(messages)


@pytest.mark.chaos
def test_a_busy_owner_is_a_source_of_its_peers(slow_fleet: Fleet) -> None:
    """Decode worker to decode worker: the whole prefix comes over."""
    cluster = slow_fleet.routers[0]
    conversation = Conversation(300, num_prompt=1000, num_answer=100)
    owner = conversation.first_turn(cluster).timing.decode_worker
    cluster.wait_until_idle()
    busy = Busy(cluster, conversation)
    second = conversation.second_turn(cluster)
    assert busy.finish().timing.decode_worker == owner
    assert second.timing.decode_worker != owner
    assert second.usage.cached_tokens == conversation.num_held
    cluster.wait_until_idle()


def test_the_source_dies_while_it_sends(slow_fleet: Fleet) -> None:
    """The prompt is computed after all, in the same attempt; the owner's own stream goes on elsewhere."""
    cluster = slow_fleet.routers[0]
    conversation = Conversation(400, num_prompt=1000, num_answer=100)
    owner = cluster.worker(conversation.first_turn(cluster).timing.decode_worker)
    cluster.wait_until_idle()
    busy = Busy(cluster, conversation)
    (other,) = [worker for worker in cluster.client.status()["workers"] if worker["id"] != owner["id"]]
    failures = metric(cluster, "baton_kv_pull_failures_total")
    pulled = metric(cluster, "baton_kv_pulled_tokens_total")
    placements = metric(cluster, "baton_placements_total", f'decode="{other["id"]}"')
    with ThreadPoolExecutor(1) as pool:
        second_turn = pool.submit(conversation.second_turn, cluster)
        wait_until(lambda: metric(cluster, "baton_placements_total", f'decode="{other["id"]}"') > placements)
        wait_until(lambda: port_of(other) in connected_ports(owner["pid"]))
        slow_fleet.remove(owner["id"], signal.SIGKILL)
        second = second_turn.result()
    assert second.timing.retries == 0
    # Nothing, or all of it if the owner's stream, which has the same prefix, was computed there first.
    assert second.usage.cached_tokens in (0, conversation.num_held)
    assert second.timing.decode_worker == other["id"]
    assert second.timing.ttft_s < PULL_TIMEOUT_S, "it is the death that ends the pull"
    assert busy.finish().timing.retries == 1
    wait_until(lambda: metric(cluster, "baton_kv_pull_failures_total") == failures + 1)
    assert metric(cluster, "baton_kv_pulled_tokens_total") == pulled
    cluster.wait_until_idle()


def port_of(worker: dict[str, Any]) -> int:
    return int(worker["address"].rpartition(":")[2])


def connected_ports(pid: int) -> set[int]:
    """To which ports a process has connections."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {c.raddr.port for c in connections if c.status == psutil.CONN_ESTABLISHED}


# -- the first token waits for no KV transfer --------------------------------------------------------------------------

LINK_DELAY_S = 1.0


@pytest.mark.chaos
def test_a_slow_transport_delays_no_first_token() -> None:
    """A second for every chunk of the KV transfer: the second token waits for it, the first does not."""
    with running_fleet(TransferConfig(), SPLIT, faults=f"link_delay_ms={1e3 * LINK_DELAY_S:.0f}") as fleet:
        cluster = fleet.fill(*Role)
        for seed in range(5):
            prompt = prompt_of(1000 + seed, 100)
            began_s = time.perf_counter()
            messages = cluster.inference.Generate(request(token_ids=prompt, sampling=sampling(2)), timeout=60)
            first = next(messages)
            first_s = time.perf_counter()
            second = next(messages)
            gap_s = time.perf_counter() - first_s
            print(f"first token after {1e3 * (first_s - began_s):.1f} ms, the second {1e3 * gap_s:.0f} ms later")
            assert [*first.token_ids, *second.token_ids] == expected_tokens(prompt, 2)
            assert gap_s >= 0.9 * LINK_DELAY_S
            timing = second.timing
            assert timing.transfer_s >= 0.9 * LINK_DELAY_S
            stages_s = timing.queue_s + timing.admission_s + timing.prefill_s + timing.transfer_s + timing.decode_s
            assert stages_s + timing.recovery_s == pytest.approx(timing.total_s, abs=1e-3), (
                "a stage is missing, or twice there"
            )
