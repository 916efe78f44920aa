"""What the cluster does around the model: cancels, deaths, bad requests, traces. On the arithmetic engine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import httpx2
import psutil
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.errors import BatonError
from baton.v1 import inference_pb2, inference_pb2_grpc
from engine.testing import expected_tokens
from kvstore.index import RedisConnection
from kvstore.leases import RedisLeases
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Answer, Cluster, Served, request
from tests.integration.conftest import TraceReceiver
from tests.support.asking import exposition, held_by, metric, prompt_of, sample, sampling
from tests.support.processes import running
from tests.support.waiting import wait_until

NUM_PAIRS = 4
"""Each prefill worker of the arithmetic cluster may have a link to each decode worker."""
LINKS_OF_A_WORKER = 2
"""A worker of the arithmetic cluster may have a link to each of the two workers in the other pool."""

pytestmark = pytest.mark.first


def epoch_in(status: dict[str, Any], worker_id: str) -> int:
    """The worker's epoch in that status; 0 if it is not listed there: it has died and not joined again."""
    return next((worker["epoch"] for worker in status["workers"] if worker["id"] == worker_id), 0)


def test_streams_are_what_the_arithmetic_says(arithmetic_cluster: Cluster) -> None:
    prompts = [prompt_of(i, num_tokens) for i, num_tokens in enumerate((1, 15, 16, 17, 100, 700, 1500))]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: arithmetic_cluster.generate(token_ids=p, sampling=sampling(40)), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, 40)
        assert answer.timing.mode == "disaggregated"
        assert answer.timing.retries == 0


def test_workers_run_at_the_priority_of_whatever_started_the_cluster(arithmetic_cluster: Cluster) -> None:
    """Ray would put them behind every other process of the machine."""
    pids = [worker["pid"] for worker in arithmetic_cluster.client.status()["workers"]]
    assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process(arithmetic_cluster.process.pid).nice()}


def test_choices_are_separate_streams(arithmetic_cluster: Cluster) -> None:
    prompt = prompt_of(50, 40)
    answer = arithmetic_cluster.generate(token_ids=prompt, sampling=sampling(5, n=3))
    for index in range(3):
        assert answer.choice(index).token_ids == expected_tokens(prompt, 5)
        assert answer.choice(index).finish_reason == "length"
    assert answer.usage.prompt_tokens == 40
    assert answer.usage.completion_tokens == 15
    assert sum(message.HasField("usage") for message in answer.messages) == 1


def test_a_repeated_prompt_lands_on_its_owner_and_survives_the_owner(arithmetic_cluster: Cluster) -> None:
    """Ends with the pool whole again."""
    cluster = arithmetic_cluster
    prompt = prompt_of(60, 640)
    with held_by(cluster) as num_tokens:
        first = cluster.generate(token_ids=prompt, sampling=sampling(4))
        num_tokens[first.timing.prefill_worker] = 640
    cluster.wait_until_idle()
    second = cluster.generate(token_ids=prompt, sampling=sampling(4))
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 624
    owner = second.timing.prefill_worker
    assert owner == first.timing.prefill_worker
    before = cluster.worker(owner)
    psutil.Process(before["pid"]).kill()
    third = cluster.generate(token_ids=prompt, sampling=sampling(4))
    assert third.token_ids == second.token_ids == expected_tokens(prompt, 4)
    assert third.timing.prefill_worker != owner
    cluster.wait_for(
        lambda status: status["pools"]["prefill"]["ready"] == 2 and epoch_in(status, owner) > before["epoch"]
    )


@pytest.mark.parametrize(
    ("role", "num_requests", "num_prompt_tokens", "num_tokens"),
    [pytest.param("prefill", 96, 1200, 8, marks=pytest.mark.chaos), ("decode", 16, 200, 400)],
)
def test_a_killed_worker_loses_no_stream(
    arithmetic_cluster: Cluster, role: str, num_requests: int, num_prompt_tokens: int, num_tokens: int
) -> None:
    """Streams under way when a worker dies go on, without a missing or repeated token."""
    cluster = arithmetic_cluster
    status = cluster.wait_for(lambda s: s["pools"][role]["ready"] == 2)
    victim = next(worker for worker in status["workers"] if worker["role"] == role)
    prompts = [prompt_of(2000 + i, num_prompt_tokens) for i in range(num_requests)]
    timer = threading.Timer(0.3, psutil.Process(victim["pid"]).kill)
    with ThreadPoolExecutor(16) as pool:
        timer.start()
        answers = list(pool.map(lambda p: cluster.generate(token_ids=p, sampling=sampling(num_tokens)), prompts))
    timer.join()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, num_tokens)
    assert any(answer.timing.retries for answer in answers), "the worker died with nothing to do"
    cluster.wait_for(
        lambda status: status["pools"][role]["ready"] == 2 and epoch_in(status, victim["id"]) > victim["epoch"]
    )
    cluster.wait_until_idle()


@pytest.mark.timeout(600)
def test_random_cancels_leave_nothing_behind(arithmetic_cluster: Cluster) -> None:
    """50 requests, half of them cancelled at random points: in queue, prefill, KV transfer or decode."""
    cluster = arithmetic_cluster
    dice = random.Random(1)
    plans = [
        (prompt_of(i, dice.choice((5, 40, 300, 900))), dice.random() < 0.5, dice.random() * 0.5) for i in range(50)
    ]

    def run(plan: tuple[list[int], bool, float]) -> bool:
        prompt, is_cancelled, delay_s = plan
        call = cluster.inference.Generate(request(token_ids=prompt, sampling=sampling(60)), timeout=240)
        timer = threading.Timer(delay_s, call.cancel)
        if is_cancelled:
            timer.start()
        tokens: list[int] = []
        try:
            for message in call:
                tokens += message.token_ids
        except grpc.RpcError:
            if not (is_cancelled and call.code() is grpc.StatusCode.CANCELLED):
                raise
        finally:
            timer.cancel()
        expected = expected_tokens(prompt, 60)
        assert tokens == expected[: len(tokens)]
        assert is_cancelled or len(tokens) == 60
        return len(tokens) < 60

    def held() -> dict[str, tuple[int, int]]:
        """Threads and open files of every worker and of the router."""
        status = cluster.client.status()
        pids = {w["id"]: w["pid"] for w in status["workers"]} | {r["id"]: r["pid"] for r in status["routers"]}
        return {name: (psutil.Process(p).num_threads(), psutil.Process(p).num_fds()) for name, p in pids.items()}

    def round_of_them() -> None:
        with ThreadPoolExecutor(24) as pool:
            assert sum(pool.map(run, plans)) >= 15
        cluster.wait_until_idle()

    def leaves_something() -> bool:
        before = held()
        round_of_them()
        try:
            wait_until(  # gRPC closes idle sockets a little later
                lambda: all(
                    now <= was for name, nums in held().items() for now, was in zip(nums, before[name], strict=True)
                ),
                20.0,
                every_s=0.5,
            )
        except AssertionError:
            print(f"before {before}, after {held()}")
            return True
        return False

    round_of_them()  # every thread pool is full
    time.sleep(3)  # sockets of the exporters and of workers killed before settle down
    first, num_clean = held(), 0
    for _ in range(NUM_PAIRS + 2):  # a pair that first meets keeps its link, once; a leak is in every round
        num_clean += not leaves_something()
        if num_clean == 2:
            break
    assert num_clean == 2
    for name, (num_threads, num_files) in held().items():
        num_links = 0 if name.startswith("router") else LINKS_OF_A_WORKER  # each takes a thread and two files
        assert num_threads <= first[name][0] + num_links, (name, first)
        assert num_files <= first[name][1] + 2 * num_links, (name, first)


def test_an_http_client_that_leaves_ends_its_request(arithmetic_cluster: Cluster) -> None:
    """Streaming or not: once the connection is gone, the workers hold nothing."""
    for stream in (True, False):
        body = {"prompt": prompt_of(90, 30), "max_tokens": 7000, "temperature": 0, "ignore_eos": True, "stream": stream}
        connection = http.client.HTTPConnection(arithmetic_cluster.http, timeout=30)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        arithmetic_cluster.wait_for(lambda s: any(w["blocks"]["in_use"] for w in s["workers"] if w["role"] == "decode"))
        num_before = _num_cancelled(arithmetic_cluster)
        connection.close()
        arithmetic_cluster.wait_until_idle()
        assert _num_cancelled(arithmetic_cluster) == num_before + 1


def test_redis_dies_and_nobody_notices(arithmetic_cluster: Cluster) -> None:
    """Requests go on while it is away; it comes back empty, and is told again who lives and who holds what."""
    cluster = arithmetic_cluster
    prompt = prompt_of(95, 640)

    def ask() -> Answer:
        return cluster.generate(token_ids=prompt, sampling=sampling(4))

    first = ask()
    wait_until(lambda: ask().usage.cached_tokens == 624)  # found again, it is protected from eviction
    (redis,) = running(cluster.processes(), "valkey-server")
    num_served = Counter[int]()
    stop = threading.Event()

    def serve(client: int) -> None:
        while not stop.is_set():
            fresh = prompt_of(1000 + num_served[client] % 32, 50)  # few enough that none evicts the first prompt
            assert cluster.generate(token_ids=fresh, sampling=sampling(20)).token_ids == expected_tokens(fresh, 20)
            num_served[client] += 1

    with ThreadPoolExecutor(4) as pool:
        serving = [pool.submit(serve, client) for client in range(4)]
        redis.kill()
        try:
            time.sleep(6)  # dead for half a second, then empty: time enough for every lease to be missing once
            wait_until(lambda: min(num_served[client] for client in range(4)) > 5, 120.0, seen=lambda: num_served)
        finally:
            stop.set()
        for task in serving:
            task.result()
    cluster.wait_for(lambda s: s["redis"]["ok"] and all(p["ready"] == 2 for p in s["pools"].values()))
    again = ask()
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 624


def test_what_the_index_says_too_much_is_counted_once() -> None:
    """Redis stands still, and the only prefill worker evicts a prompt: nobody hears of it but by its answers."""
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated"), num_blocks=64) as fleet:
        cluster = fleet.fill(*Role)
        prompts = [prompt_of(1100 + index, 640) for index in range(3)]
        of_prefill = f'worker="{cluster.ids("prefill")[0]}"'

        def ask(index: int) -> tuple[int, float]:
            """Cached tokens, and stale ones counted so far."""
            answer = cluster.generate(token_ids=prompts[index], sampling=sampling(4))
            assert answer.token_ids == expected_tokens(prompts[index], 4)
            return answer.usage.cached_tokens, metric(cluster, "baton_index_stale_tokens_total")

        assert ask(0) == (0, 0)
        wait_until(lambda: metric(cluster, "baton_mirror_blocks", of_prefill) == 40)
        assert ask(0) == (624, 0)
        fleet.redis.pause()
        try:
            assert (ask(1), ask(2)) == ((0, 0), (0, 0))  # 80 blocks in a pool of 64: none of the first prompt is left
            assert ask(0) == (0, 624)
            assert ask(0) == (624, 624)
        finally:
            fleet.redis.resume()
        assert metric(cluster, "baton_index_stale_hints_total") == 1
        cached = partial(metric, cluster, "baton_kv_blocks", of_prefill, 'state="cached"')
        wait_until(lambda: metric(cluster, "baton_mirror_blocks", of_prefill) == cached() > 40)
        assert ask(0) == (624, 624)


def test_a_frozen_worker_is_left_within_seconds(arithmetic_cluster: Cluster) -> None:
    """SIGSTOP closes no socket: only unanswered pings tell."""
    cluster = arithmetic_cluster
    cluster.wait_for(lambda s: s["pools"]["decode"]["ready"] == 2)
    cluster.wait_until_idle()  # else a lease may still tell of blocks that a request before held
    prompt = prompt_of(200, 100)
    messages = cluster.inference.Generate(request(token_ids=prompt, sampling=sampling(6000)), timeout=120)
    tokens = list(next(messages).token_ids)
    status = cluster.wait_for(
        lambda s: sum(w["blocks"]["in_use"] > 0 for w in s["workers"] if w["role"] == "decode") == 1
    )
    (victim,) = [w for w in status["workers"] if w["role"] == "decode" and w["blocks"]["in_use"]]
    frozen = psutil.Process(victim["pid"])
    frozen.suspend()
    try:
        longest_gap_s, last_s = 0.0, time.monotonic()
        for message in messages:
            now = time.monotonic()
            longest_gap_s, last_s = max(longest_gap_s, now - last_s), now
            tokens += message.token_ids
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # the controller ends one that is silent for long
            frozen.resume()
    assert tokens == expected_tokens(prompt, 6000)
    assert message.timing.retries == 1
    assert longest_gap_s < 20, "gRPC's own default is a minute"
    cluster.wait_for(lambda s: s["pools"]["decode"]["ready"] == 2)
    cluster.wait_until_idle()


def test_a_client_whose_line_stands_still_for_seconds_keeps_its_streams(arithmetic_cluster: Cluster) -> None:
    """To a router that stood still itself, every client looks like that."""
    cluster = arithmetic_cluster
    is_over, answers = threading.Event(), threading.Semaphore(0)

    def ask(channel: grpc.Channel, seed: int) -> None:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while not is_over.is_set():
            prompt = prompt_of(seed, 1000)
            answer = Answer(list(stub.Generate(request(token_ids=prompt, sampling=sampling(8)), timeout=60)))
            assert answer.token_ids == expected_tokens(prompt, 8)
            answers.release()

    with ThreadPoolExecutor(4) as pool, SlowLine(cluster.grpc) as line, grpc.insecure_channel(line.address) as channel:
        asking = [pool.submit(ask, channel, seed) for seed in range(4)]
        assert all(answers.acquire(timeout=20) for _ in range(16))
        line.hold()
        time.sleep(12)  # after 5 s of silence the router asks whether the client is there, and has no answer for 7 s
        line.let_go()
        is_over.set()
        for future in asking:
            future.result(timeout=20)
    cluster.wait_until_idle()


class SlowLine:
    """Between one client and a server: what the client says can be held back."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._flows = threading.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._serve)

    def hold(self) -> None:
        self._flows.clear()

    def let_go(self) -> None:
        self._flows.set()

    def __enter__(self) -> SlowLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _serve(self) -> None:
        host, port = self._server.rsplit(":", 1)
        with self._listener:
            client, _ = self._listener.accept()
        with client, socket.create_connection((host, int(port))) as server:
            upwards = threading.Thread(target=self._upwards, args=(client, server))
            upwards.start()
            self._downwards(server, client)
            with contextlib.suppress(OSError):  # the client may have been first
                client.shutdown(socket.SHUT_RDWR)
            upwards.join()

    def _downwards(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(2**16):
                client.sendall(data)

    def _upwards(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(2**16):
                self._flows.wait()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)


def test_the_last_message_carries_the_usage_whatever_choice_ends_last(arithmetic_cluster: Cluster) -> None:
    for seed in range(20):
        answer = arithmetic_cluster.generate(token_ids=prompt_of(300 + seed, 5), sampling=sampling(3, n=8))
        assert [m.HasField("usage") for m in answer.messages] == [False] * (len(answer.messages) - 1) + [True]
        assert answer.usage.completion_tokens == 24


def post(cluster: Cluster, path: str, body: object) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(cluster.http, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


COMPLETION = {"prompt": "hi", "max_tokens": 2}


def num_placed(cluster: Cluster) -> float:
    return metric(cluster, "baton_placements_total")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({**COMPLETION, "n": 2, "top_k": 2**32}, 200),
        ({**COMPLETION, "priority": 1}, 400),
        ({**COMPLETION, "model": "gpt-4"}, 404),
        (b" " * (9 * 2**20), 413),
    ],
)
def test_odd_http_requests_get_an_answer_of_openais_shape(
    arithmetic_cluster: Cluster, body: object, status: int
) -> None:
    """One for each kind of refusal; tests/unit/router/test_service.py has many more."""
    before = num_placed(arithmetic_cluster)
    got, answer = post(arithmetic_cluster, "/v1/completions", body)
    assert got == status, answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]
    assert (num_placed(arithmetic_cluster) > before) == (status == 200), "no worker sees a bad request"


def test_every_event_carries_the_usage_so_far_when_asked(arithmetic_cluster: Cluster) -> None:
    """vLLM's `continuous_usage_stats`, for which guidellm asks."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompt_of(310, 40), "max_tokens": 12, "stream": True, "stream_options": options}
    url = f"http://{arithmetic_cluster.http}/v1/completions"
    with httpx2.stream("POST", url, json=body, timeout=30) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    usages = [json.loads(event)["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert (counts, counts[-1]) == (sorted(counts), 12)
    assert len(set(counts)) > 2
    assert {usage["prompt_tokens"] for usage in usages} == {40}
    assert all(usage["total_tokens"] == 40 + usage["completion_tokens"] for usage in usages)


def test_the_router_restarts(arithmetic_cluster: Cluster) -> None:
    cluster = arithmetic_cluster
    before = cluster.client.status()["routers"][0]["pid"]
    psutil.Process(before).kill()

    def is_back() -> bool:
        status = cluster.client.status()
        return status["routers"][0]["pid"] != before and all(p["ready"] == 2 for p in status["pools"].values())

    wait_until(is_back, 150.0, not_yet=(BatonError,))
    prompt = prompt_of(400, 100)
    assert cluster.generate(token_ids=prompt, sampling=sampling(5)).token_ids == expected_tokens(prompt, 5)


@pytest.mark.chaos
def test_pools_too_small_for_all_streams_preempt_and_stay_exact() -> None:
    """24 streams of 600 tokens and more, in pools of 1,024: received sequences are preempted and computed again."""
    prompts = [prompt_of(500 + i, 30 + 7 * i) for i in range(24)]
    router = RouterConfig(mode="disaggregated")
    with running_fleet(TransferConfig(), router, num_blocks=64, output_reservation=16) as fleet:
        cluster = fleet.fill(Role.PREFILL, Role.DECODE, Role.DECODE)
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda p: cluster.generate(token_ids=p, sampling=sampling(600)), prompts))
        cluster.wait_until_idle()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(prompt, 600)
        assert answer.timing.retries == 0, "preemption is the worker's own affair"


@pytest.fixture(scope="module")
def spoiling_fleet() -> Iterator[Fleet]:
    """A router; each test brings workers of its own."""
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated")) as fleet:
        yield fleet


@pytest.mark.parametrize("fault", ["corrupt_chunk", "drop_chunk", "swap_blocks"])
def test_spoiled_blocks_are_a_wrong_answer_or_with_checksums_an_error(spoiling_fleet: Fleet, fault: str) -> None:
    """Proof that a wrong block would be seen in the tokens. Here every chunk is spoiled, of every attempt."""
    fleet, prompt = spoiling_fleet, prompt_of(900, 100)

    def workers(transfer: TransferConfig) -> Served:
        config = replace(fleet.config, transfer=transfer, testing=replace(fleet.config.testing, faults=f"{fault}=1"))
        fleet.wait_for(*[fleet.add(role, config=config) for role in Role])
        return fleet.routers[0]

    answer = workers(TransferConfig(checksum="off")).generate(token_ids=prompt, sampling=sampling(20))
    assert answer.token_ids != expected_tokens(prompt, 20)
    assert answer.timing.retries == 0
    fleet.clear()
    with pytest.raises(grpc.RpcError, match="its checksum is") as caught:
        workers(TransferConfig()).generate(token_ids=prompt, sampling=sampling(20))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    fleet.clear()


def test_spoiled_blocks_are_detected_and_recomputed(spoiling_fleet: Fleet) -> None:
    """Some of the chunks are spoiled, the checksums tell, and no answer differs. tests/integration/test_real_model.py
    has the same with a real model.
    """
    fleet = spoiling_fleet
    config = replace(
        fleet.config, testing=replace(fleet.config.testing, faults="corrupt_chunk=17,drop_chunk=23,swap_blocks=29")
    )
    fleet.wait_for(*[fleet.add(role, config=config) for role in Role])
    cluster, prompts = fleet.routers[0], [prompt_of(1000 + i, 30 + i) for i in range(32)]
    answers = [cluster.generate(token_ids=prompt, sampling=sampling(20)) for prompt in prompts]
    assert [answer.token_ids for answer in answers] == [expected_tokens(prompt, 20) for prompt in prompts]
    assert {answer.timing.mode for answer in answers} == {"disaggregated"}
    num_retries = sum(answer.timing.retries for answer in answers)
    assert num_retries > 0
    assert metric(cluster, "baton_retries_total", 'error="TransferCorrupted"') >= num_retries
    fleet.clear()


@pytest.mark.parametrize(
    ("fields", "code", "part_of_sentence"),
    [
        ({"token_ids": [49152]}, grpc.StatusCode.INVALID_ARGUMENT, "vocabulary"),
        (
            {
                "chat": inference_pb2.ChatInput(
                    messages=[inference_pb2.ChatMessage(role="user", content="hi")],
                    tools=[inference_pb2.Tool(name="f g")],
                )
            },
            grpc.StatusCode.INVALID_ARGUMENT,
            "tools",
        ),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(
    arithmetic_cluster: Cluster, fields: dict[str, Any], code: grpc.StatusCode, part_of_sentence: str
) -> None:
    """One for each kind of refusal; tests/unit/router/test_service.py has many more."""
    before = num_placed(arithmetic_cluster)
    with pytest.raises(grpc.RpcError) as caught:
        arithmetic_cluster.generate(**fields)
    assert caught.value.code() is code
    assert part_of_sentence in (caught.value.details() or "")
    assert num_placed(arithmetic_cluster) == before, "no worker sees a bad request"


def test_every_workers_lease_tells_what_it_knows(arithmetic_cluster: Cluster) -> None:
    status = arithmetic_cluster.client.status()
    content_id = status["workers"][0]["content_id"]

    async def leased() -> list[str]:
        async with contextlib.AsyncExitStack() as stack:
            leases = RedisLeases(RedisConnection(status["redis"]["address"]), content_id)
            stack.push_async_callback(leases.close)
            return [worker.info.known_fields for worker in await leases.list_workers()]

    assert asyncio.run(leased()) == [wire.KNOWN_FIELDS] * len(status["workers"])


def test_metrics_tell_what_happened(arithmetic_cluster: Cluster) -> None:
    names = (
        "gen_ai_server_time_to_first_token_seconds_count", "gen_ai_server_request_duration_seconds_count",
        "gen_ai_server_time_per_output_token_seconds_count", "baton_inter_token_latency_seconds_count",
        "baton_stage_duration_seconds_count", "baton_transfer_duration_seconds_count",
        "baton_prefix_hit_tokens_total", "baton_prefix_ceiling_tokens_total",
    )  # fmt: skip
    prompt = prompt_of(70, 64)
    arithmetic_cluster.generate(token_ids=prompt, sampling=sampling(8))
    before = exposition(arithmetic_cluster)
    arithmetic_cluster.generate(token_ids=prompt, sampling=sampling(8))
    after = exposition(arithmetic_cluster)
    for name in names:
        assert sample(after, name) > sample(before, name), name
    assert sample(after, "baton_kv_blocks") == 4 * 512


def test_metrics_and_status_tell_of_every_workers_transfers() -> None:
    """From the leases: both sides of a KV transfer count it, with the worker's id and role. A cluster that has had none
    before, so that no lease can be of the time before.
    """
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated")) as fleet:
        cluster = fleet.fill(*Role)
        answer = cluster.generate(token_ids=prompt_of(75, 160), sampling=sampling(8))
        shown = {
            "open_connections": 1,
            "slots_in_use": 0,
            "unsent_bytes": 0,
            "committed": 1,
            "failed": 0,
            "pulled_tokens": 0,
        }
        cluster.wait_for(lambda s: [w["transfers"] for w in s["workers"]] == [shown, shown])
        text, num_bytes = exposition(cluster), 160 * 2 * 2 * 8  # K and V of two layers, 8 bytes each
        for role, way, other_way in (("prefill", "sent", "received"), ("decode", "received", "sent")):

            def counted(name: str, *labels: str, role: str = role) -> float:
                (worker,) = cluster.ids(role)
                return sample(text, f"baton_kv_{name}", f'worker="{worker}"', f'role="{role}"', *labels)

            by_way = {direction: f'direction="{direction}"' for direction in (way, other_way)}
            assert counted("transfers_total", by_way[way], 'outcome="committed"') == 1
            assert counted("transfers_total") == 1, "none has failed, and none went the other way"
            assert counted("transfer_failures_total") == counted("pull_failures_total") == 0
            assert counted("transfer_bytes_total", by_way[way]) == counted("transfer_bytes_total") == num_bytes
            assert counted("transfer_chunks_total", by_way[way]) == counted("transfer_chunks_total") >= 1
            exposed_s = counted("transfer_exposed_time_seconds_total")
            if way == "sent":  # the client's is no more than the time to the second token
                assert 0 < answer.timing.transfer_s <= exposed_s + 1e-6
            else:
                assert exposed_s == 0
            assert (counted("transfer_time_seconds_total") > 0) == (way == "sent"), "the sender counts seconds"
            assert counted("open_connections") == 1
            assert counted("unsent_bytes") == counted("staging_slots_in_use") == 0, "idle"


def test_one_trace_per_request(arithmetic_cluster: Cluster, trace_receiver: tuple[TraceReceiver, str]) -> None:
    receiver = trace_receiver[0]
    request_id = f"traced-{time.time_ns()}"
    arithmetic_cluster.generate(request_id=request_id, token_ids=prompt_of(80, 64), sampling=sampling(8))
    wanted = {
        ("baton-router", "text_completion smollm2-135m-instruct"), ("baton-prefill", "prefill.queue"),
        ("baton-prefill", "prefill.compute"), ("baton-prefill", "kv.transfer"), ("baton-decode", "decode"),
    }  # fmt: skip

    def spans() -> tuple[list[Span], list[tuple[str, Span]]]:
        """The request's own, and those of its trace."""
        roots = [s for _, s in receiver.spans if any(a.value.string_value == request_id for a in s.attributes)]
        return roots, [(service, s) for service, s in receiver.spans if roots and s.trace_id == roots[0].trace_id]

    wait_until(
        lambda: wanted <= {(service, span.name) for service, span in spans()[1]},
        seen=lambda: sorted({(service, span.name) for service, span in receiver.spans}),
    )
    roots, trace = spans()
    assert len(roots) == 1
    predicted = {a.key: a.value.double_value for a in roots[0].attributes if a.key.startswith("baton.predicted.")}
    names = ("wait_s", "room_s", "pull_s", "compute_s", "exposed_s", "step_s", "ttft_s")
    assert set(predicted) == {f"baton.predicted.{name}" for name in names}
    assert predicted["baton.predicted.compute_s"] > 0
    assert predicted["baton.predicted.ttft_s"] >= predicted["baton.predicted.compute_s"]
    children = [span for _, span in trace if span.name != roots[0].name]
    assert all(span.parent_span_id == roots[0].span_id for span in children)
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for _, span in trace)


def _num_cancelled(cluster: Cluster) -> float:
    return metric(cluster, "baton_requests_total", 'outcome="cancelled"')
