"""Workers that leave, or change their role, while they are busy: their choices go on elsewhere, KV and all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton.cluster import Role
from baton.config import Config, IndexConfig, RouterConfig, TestingConfig, TransferConfig
from baton.v1 import worker_pb2
from deploy.processes import tied
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import free_port, is_idle, request
from tests.support.asking import metric, prompt_of
from tests.support.load import Stream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

TRANSFER = TransferConfig(pull_timeout_s=30.0)
LEASE_S = 15.0
"""Nothing here waits for the end of a pull or of a lease: a worker that stands still for seconds loses neither."""
STEP_MS = 10.0
NUM_STREAMS = 6
BLOCK_SIZE = 16


def stream_of(fleet: Fleet, prompt: list[int], max_tokens: int) -> Stream:
    return Stream(inference=fleet.inference, prompt=prompt, max_tokens=max_tokens, timeout_s=120)


@contextlib.contextmanager
def streaming(fleet: Fleet, num_streams: int, max_tokens: int, num_prompt_tokens: int = 100) -> Iterator[list[Stream]]:
    """Streams that run while the block is entered; leaving it waits for their ends, and checks all of them."""
    streams = [stream_of(fleet, prompt_of(i, num_prompt_tokens + i), max_tokens).start() for i in range(num_streams)]
    try:
        yield streams
    finally:
        for each in streams:
            each.wait()
    for each in streams:
        each.served()


@contextlib.contextmanager
def hanging_up(fleet: Fleet, num_streams: int, max_tokens: int) -> Iterator[list[Stream]]:
    """Streams that are still there at the end of the block, and cancelled then."""
    streams = [stream_of(fleet, prompt_of(i, 100), max_tokens).start() for i in range(num_streams)]
    try:
        yield streams
        assert not any(stream.is_over for stream in streams)
    finally:
        for each in streams:
            each.cancel()
            each.wait()


def wait_for_tokens(streams: list[Stream], num_tokens: int) -> None:
    """Until each has so many."""
    wait_until(
        lambda: all(len(stream.tokens) >= num_tokens for stream in streams),
        60.0,
        every_s=0.01,
        seen=lambda: [(len(stream.tokens), stream.error) for stream in streams],
    )


@pytest.fixture(scope="module")
def disaggregated_fleet() -> Iterator[Fleet]:
    """A router; each test brings workers of its own."""
    router = RouterConfig(mode="disaggregated", cache_secret="drain")
    with running_fleet(TRANSFER, router, step_ms=STEP_MS, lease_s=LEASE_S) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def aggregated_fleet() -> Iterator[Fleet]:
    """A router; each test brings workers of its own."""
    router = RouterConfig(mode="aggregated", cache_secret="drain")
    with running_fleet(TRANSFER, router, step_ms=STEP_MS, lease_s=LEASE_S) as fleet:
        yield fleet


class Workers:
    """The workers of one test, which end with it.

    Attributes:
        first: the first one of each role.
    """

    def __init__(self, fleet: Fleet, step_ms: float) -> None:
        self.fleet = fleet
        self.first: dict[Role, str] = {}
        self._config = replace(fleet.config, testing=replace(fleet.config.testing, step_ms=step_ms))

    def add(self, *roles: Role) -> list[str]:
        """Starts one of each, and waits until they are ready. Returns their ids."""
        worker_ids = [self.fleet.add(role, config=self._config) for role in roles]
        self.fleet.wait_for(*worker_ids)
        self.first = dict(zip(roles, worker_ids, strict=True)) | self.first
        return worker_ids


@contextlib.contextmanager
def working(fleet: Fleet, *roles: Role, step_ms: float = STEP_MS) -> Iterator[Workers]:
    """A prefill worker, and a decode worker that is the only one so far, unless other roles are named."""
    workers = Workers(fleet, step_ms)
    workers.add(*(roles or Role))
    try:
        yield workers
    finally:
        fleet.clear()


def computed_tokens(fleet: Fleet) -> int:
    return sum(worker["computed_tokens"] for worker in fleet.client.status()["workers"])


def wait_until_counted(fleet: Fleet, num_tokens: int) -> None:
    """Until all workers are idle, and say that they have computed no fewer tokens: each says both at once."""
    wait_until(
        lambda: (
            all(is_idle(worker) for worker in fleet.client.status()["workers"]) and computed_tokens(fleet) >= num_tokens
        ),
        seen=lambda: fleet.client.status(),
    )


@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("aggregated", marks=pytest.mark.chaos)])
def test_a_draining_decode_worker_hands_over_its_running_choices(mode: str, request: pytest.FixtureRequest) -> None:
    max_tokens = 1000
    fleet: Fleet = request.getfixturevalue(f"{mode}_fleet")
    with working(fleet) as workers:
        num_moved = metric(fleet.routers[0], "baton_migrations_total", 'pulled="true"')
        with streaming(fleet, NUM_STREAMS, max_tokens) as streams:
            wait_for_tokens(streams, 80)
            (successor,) = workers.add(Role.DECODE)
            with fleet.control(workers.first[Role.DECODE]) as worker:
                began_s = time.monotonic()
                left = worker.Drain(worker_pb2.DrainRequest(timeout_s=30)).num_left
                took_s = time.monotonic() - began_s
            fewest_left = max_tokens - max(len(stream.tokens) for stream in streams)
        num_known = sum(len(stream.prompt) + max_tokens - 1 for stream in streams)
        wait_until_counted(fleet, num_known)
        gap_s = max(stream.longest_gap_s for stream in streams)
        num_again = computed_tokens(fleet) - num_known
        print(
            f"{mode}: drained in {took_s:.2f} s, at least {fewest_left} tokens before the ends; "
            f"{num_again} tokens computed again; longest gap {gap_s:.3f} s"
        )
        assert left == 0
        assert fewest_left > 200, "they were to be moved in the middle"
        assert {stream.timing.decode_worker for stream in streams} == {successor}
        assert not any(stream.retries for stream in streams)
        assert num_again <= NUM_STREAMS * BLOCK_SIZE
        num_moved = metric(fleet.routers[0], "baton_migrations_total", 'pulled="true"') - num_moved
        assert num_moved == NUM_STREAMS
        assert took_s < fewest_left * STEP_MS / 1e3 / 2, "it waited for ends"


def test_sigterm_drains(disaggregated_fleet: Fleet) -> None:
    fleet = disaggregated_fleet
    with working(fleet) as workers:
        with streaming(fleet, 2, 1200) as streams:
            wait_for_tokens(streams, 40)
            (successor,) = workers.add(Role.DECODE)
            fleet.remove(workers.first[Role.DECODE], signal.SIGTERM)
            assert all(len(stream.tokens) < 1100 for stream in streams)
        assert {(stream.timing.decode_worker, stream.retries) for stream in streams} == {(successor, 0)}


def test_a_draining_prefill_worker_hands_back_what_it_has_not_begun(disaggregated_fleet: Fleet) -> None:
    fleet = disaggregated_fleet
    with working(fleet, step_ms=300) as workers:
        # Each is more than a step of the worker, so most of them wait for a while.
        with streaming(fleet, 10, 2, num_prompt_tokens=500) as streams:
            time.sleep(1.0)
            workers.add(Role.PREFILL)
            with fleet.control(workers.first[Role.PREFILL]) as worker:
                assert worker.Drain(worker_pb2.DrainRequest(timeout_s=20)).num_left == 0
        assert not any(stream.retries for stream in streams)


@pytest.mark.chaos
def test_roles_change_under_load_and_the_cache_stays(disaggregated_fleet: Fleet) -> None:
    fleet = disaggregated_fleet
    with working(fleet) as workers:
        (flipped,) = workers.add(Role.DECODE)
        pids = {worker_id: process.pid for worker_id, process in fleet.workers.items()}
        with streaming(fleet, 8, 600) as streams:
            wait_for_tokens(streams, 20)
            for role in ("prefill", "decode", "prefill"):
                with fleet.control(flipped) as worker:
                    worker.SetRole(worker_pb2.SetRoleRequest(role=role, timeout_s=20))
                wait_until(lambda: role_of(fleet, flipped) == (role, "ready"))  # noqa: B023 - at once
                time.sleep(0.5)
            fleet.remove(workers.first[Role.PREFILL], signal.SIGTERM)
            # The flipped one alone prefills now. It has decoded, or not, but nobody has forgotten anything.
            stream_of(fleet, streams[0].prompt + [5] * 20, 4).served()
        assert {worker_id: process.pid for worker_id, process in fleet.workers.items()}.items() <= pids.items()
        assert not any(stream.retries for stream in streams)


def test_a_flipped_worker_keeps_its_prefixes(aggregated_fleet: Fleet) -> None:
    prompt = list(range(1, 200))
    fleet = aggregated_fleet
    with working(fleet) as workers:
        flipped = workers.first[Role.DECODE]
        stream_of(fleet, prompt, 2).served()  # it has computed this
        workers.add(Role.DECODE)
        with fleet.control(flipped) as worker:
            worker.SetRole(worker_pb2.SetRoleRequest(role="prefill", timeout_s=20))
            wait_until(lambda: role_of(fleet, flipped) == ("prefill", "ready"))
        with fleet.control(flipped) as worker:
            worker.SetRole(worker_pb2.SetRoleRequest(role="decode", timeout_s=20))
        wait_until(lambda: role_of(fleet, flipped) == ("decode", "ready"))
        answer = list(fleet.inference.Generate(request(token_ids=prompt, sampling={"max_tokens": 2}), timeout=30))[-1]
        assert answer.usage.cached_tokens == 192
        assert answer.timing.decode_worker == flipped


def test_a_worker_that_cannot_be_freed_keeps_its_role(disaggregated_fleet: Fleet) -> None:
    fleet = disaggregated_fleet
    with working(fleet) as workers, hanging_up(fleet, 2, 7000) as streams:
        busy = workers.first[Role.DECODE]
        wait_for_tokens(streams, 20)
        with fleet.control(busy) as worker:
            with pytest.raises(grpc.RpcError, match=f"calls were still running on {busy}") as failed:
                worker.SetRole(worker_pb2.SetRoleRequest(role="prefill", timeout_s=0.3))
            assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            wait_until(lambda: role_of(fleet, busy) == ("decode", "ready"))
            order = worker.SetRole.future(worker_pb2.SetRoleRequest(role="prefill", timeout_s=20))
            wait_until(lambda: role_of(fleet, busy) == ("decode", "draining"))
            order.cancel()  # whoever gave the order has died
            wait_until(lambda: role_of(fleet, busy) == ("decode", "ready"))
            with pytest.raises(grpc.RpcError, match="prefill or decode"):
                worker.SetRole(worker_pb2.SetRoleRequest(role="router", timeout_s=1))


def role_of(fleet: Fleet, worker_id: str) -> tuple[str, str]:
    """Its role and state; both are empty while it is not listed."""
    found = ((w["role"], w["state"]) for w in fleet.client.status()["workers"] if w["id"] == worker_id)
    return next(found, ("", ""))


def test_a_worker_that_waits_for_redis_to_join_ends_at_once(tmp_path: Path) -> None:
    """Nobody has sent it anything yet."""
    config = Config(
        testing=TestingConfig(arithmetic=True), index=IndexConfig(redis_url=f"redis://127.0.0.1:{free_port()}")
    )
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            tied([sys.executable, "-m", "worker", "decode", "worker-0", "127.0.0.1"]),
            env=os.environ | {"BATON_CONFIG_JSON": config.to_json()},
            stderr=output,
        )
    try:
        wait_until(lambda: "the lease store is unavailable" in log.read_text(), within_s=60)
        worker.terminate()
        assert worker.wait(10) == -signal.SIGTERM
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.chaos
def test_a_worker_that_ends_waits_until_its_last_choice_has_moved(disaggregated_fleet: Fleet) -> None:
    """Even where the next worker is so busy that it takes a while to answer."""
    fleet = disaggregated_fleet
    with working(fleet, step_ms=60) as workers:
        successors = workers.add(*[Role.PREFILL] * 4)  # a start takes seconds, a change of role does not
        leaver = workers.first[Role.DECODE]
        with streaming(fleet, 2, 240) as streams:
            for number, successor in enumerate(successors, 1):
                wait_for_tokens(streams, 20 * number)
                with fleet.control(successor) as worker:
                    worker.SetRole(worker_pb2.SetRoleRequest(role="decode", timeout_s=20))
                wait_until(lambda: role_of(fleet, successor) == ("decode", "ready"))  # noqa: B023 - at once
                fleet.remove(leaver, signal.SIGTERM)
                leaver = successor
        assert {(stream.timing.decode_worker, stream.retries) for stream in streams} == {(leaver, 0)}


@pytest.mark.chaos
def test_two_workers_that_leave_at_once_lose_no_kv(aggregated_fleet: Fleet) -> None:
    """The one that was to take over leaves as well: what the first one holds is pulled from there all the same."""
    num_streams, num_prompt_tokens, max_tokens = 4, 1500, 1000
    fleet = aggregated_fleet
    with working(fleet, Role.DECODE) as workers:
        with streaming(fleet, num_streams, max_tokens, num_prompt_tokens) as streams:
            wait_for_tokens(streams, 20)
            (successor,) = workers.add(Role.DECODE)
            with fleet.control(workers.first[Role.DECODE]) as first, fleet.control(successor) as second:
                leaving = first.Drain.future(worker_pb2.DrainRequest(timeout_s=30))
                time.sleep(0.02)
                assert second.Drain(worker_pb2.DrainRequest(timeout_s=0.3)).num_left >= 0
                (last,) = workers.add(Role.DECODE)
                assert leaving.result().num_left == 0
                assert second.Drain(worker_pb2.DrainRequest(timeout_s=30)).num_left == 0
        assert {stream.timing.decode_worker for stream in streams} == {last}
        num_known = sum(len(stream.prompt) + max_tokens - 1 for stream in streams)
        wait_until_counted(fleet, num_known)
        assert computed_tokens(fleet) - num_known <= 4 * num_streams * BLOCK_SIZE
