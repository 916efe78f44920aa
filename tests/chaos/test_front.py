"""A router that some clients attack goes on serving the others as fast as before, and in as little memory.

With FRONT_SECONDS=20 and -s it shows what TRUST's measurements showed.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.chaos.attackers import ATTACKS, OVER_GRPC, OVER_HTTP
from tests.integration.cluster import Cluster, request, running_cluster
from tests.support.asking import prompt_of, sampling
from tests.support.processes import running
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("FRONT_SECONDS", "10"))
SETTINGS = {
    "testing_arithmetic": "true", "testing_step_ms": "2", "engine_num_blocks": "8192",
    "engine_max_num_seqs": "256",
}  # fmt: skip
MOST_TIMES = 3.0
"""The time to first token under attack, as a multiple of that before."""
MOST_MEMORY = 1.5
"""The router's memory under attack, as a multiple of that before any attack, or before this one, whichever is less."""
MOST_MEMORY_OVER_HTTP = 2.0
"""The same where bodies or prompts are as long, and of as many parts, as they may be."""
MOST_MEMORY_OVER_GRPC = 2.5
"""The same where messages on their way are as many as they may be: 80 MiB, and 16 KiB for each that waits."""
NUM_TRIES = 3
FREE_S = 40.0
"""Until slots must be free again."""
READERS_S = 60.0
"""Readers have all slots at first: of their attack the first minute counts."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster("--prefill", "1", "--decode", "1", **SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def memory_before(cluster: Cluster) -> int:
    """The memory of a router that has served a few requests and was never attacked, in bytes."""
    observed(cluster, 2.0)
    return memory(cluster)


def first_token_s(cluster: Cluster, number: int) -> float | None:
    """The time to the first token of a short prompt; None: it is refused."""
    began_s = time.monotonic()
    message = request(token_ids=prompt_of(number, 20), sampling=sampling(2))
    try:
        chunks = cluster.inference.Generate(message, timeout=60)
        next(chunks)
        took_s = time.monotonic() - began_s
        list(chunks)
    except grpc.RpcError:
        return None
    return took_s


def observed(cluster: Cluster, seconds: float) -> tuple[list[float], int]:
    """Times to first token of a client that asks again and again, and how often it is refused."""
    found, num_refused, until_s = [], 0, time.monotonic() + seconds
    for number in range(10**6):
        if time.monotonic() > until_s:
            break
        if (took_s := first_token_s(cluster, number)) is None:
            num_refused += 1
        else:
            found.append(took_s)
        time.sleep(0.02)
    return found, num_refused


def memory(cluster: Cluster) -> int:
    """The router's own, in bytes."""
    (router,) = running(cluster.processes(), "router")
    return int(router.memory_full_info().pss)


@contextlib.contextmanager
def largest_memory(cluster: Cluster) -> Iterator[list[int]]:
    """Enters a list to which the router's memory is added four times a second until the block is left."""
    sizes, is_over = [memory(cluster)], threading.Event()

    def look() -> None:
        while not is_over.wait(0.25):
            sizes.append(memory(cluster))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield sizes
    finally:
        is_over.set()
        looking.join()


@contextlib.contextmanager
def attacked(cluster: Cluster, kind: str, seconds: float) -> Iterator[None]:
    """Attacks the cluster until the block is left, for so long at most, and enters the block when it has begun."""
    command = [sys.executable, "-m", "tests.chaos.attackers", kind, cluster.grpc, cluster.http, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as attacker:
        assert attacker.stdout is not None
        try:
            assert attacker.stdout.readline()
            yield
            assert attacker.poll() is None, "the attackers stay"
        finally:
            attacker.kill()


@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_slows_nobody_else(cluster: Cluster, memory_before: int, kind: str) -> None:
    memory_now = memory(cluster)
    for _ in range(NUM_TRIES):
        before, _ = observed(cluster, max(2.0, SECONDS / 4))
        lasts_s = READERS_S if kind == "readers" else SECONDS
        with attacked(cluster, kind, lasts_s + 30), largest_memory(cluster) as sizes:
            during, num_refused = observed(cluster, lasts_s)
        times = statistics.median([*during, *[math.inf] * num_refused]) / statistics.median(before)
        grown = max(sizes) / min(memory_before, memory_now)
        print(
            f"\n{kind}: first token {statistics.median(before) * 1e3:.1f} ms before, {times:.2f} times that during the "
            f"attack ({len(during)} of {len(during) + num_refused} served); "
            f"memory {memory_now / 2**20:.0f} MiB, then {max(sizes) / 2**20:.0f}, {grown:.2f} times the less "
            f"of that and {memory_before / 2**20:.0f} MiB before all attacks; load {os.getloadavg()[0]:.1f}"
        )
        most_memory = MOST_MEMORY_OVER_HTTP if kind in OVER_HTTP or kind == "prompts" else MOST_MEMORY
        if kind in OVER_GRPC:
            most_memory = MOST_MEMORY_OVER_GRPC
        if times < MOST_TIMES and grown < most_memory:
            break
    else:
        pytest.fail("see above")
    assert num_refused == 0 or kind == "readers"


@pytest.mark.parametrize("kind", [*OVER_HTTP, *OVER_GRPC])
def test_every_place_is_free_soon_after(cluster: Cluster, kind: str) -> None:
    (router,) = running(cluster.processes(), "router")
    num_before = router.num_fds()
    with attacked(cluster, kind, FREE_S / 4):
        time.sleep(FREE_S / 8)
    wait_until(lambda: router.num_fds() <= num_before + 2, FREE_S, seen=router.num_fds)
    response = urllib.request.urlopen(f"http://{cluster.http}/healthz", timeout=10)
    assert response.status == 200
    assert "Traceback" not in Path(cluster._log_file.name).read_text()


def test_slots_are_free_soon_though_nobody_reads(cluster: Cluster) -> None:
    """The attackers stay; they hold more slots than there are."""
    with attacked(cluster, "readers", FREE_S + 60):
        time.sleep(FREE_S)
        wait_until(lambda: first_token_s(cluster, 0) is not None, 20.0)
    cluster.wait_until_idle()
    assert "Traceback" not in Path(cluster._log_file.name).read_text()
