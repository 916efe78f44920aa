"""What clients of a cluster under test ask with, and what they read afterwards."""

from __future__ import annotations

import contextlib
import random
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.cluster import Served

VOCABULARY = 49152
FRESH_S = 0.3
"""A router writes its metrics again once five times the processor time of the last writing has passed: 20 to 50 ms."""


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=num_tokens)


def sampling(num_tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, **more}


def exposition(cluster: Served) -> str:
    headers = {"Authorization": f"Bearer {cluster.api_key}"} if cluster.api_key else {}
    scheme, context = ("https", cluster.tls.client_context()) if cluster.tls else ("http", None)
    request = urllib.request.Request(f"{scheme}://{cluster.http}/api/metrics", headers=headers)
    time.sleep(FRESH_S)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        text: str = answer.read().decode()
    return text


def metric(cluster: Served, name: str, *labels: str) -> float:
    """Sum over all label values, or over those with all of `labels`."""
    return sample(exposition(cluster), name, *labels)


def sample(text: str, name: str, *labels: str) -> float:
    """The same of an exposition, which takes `FRESH_S` to read and has many."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))


@contextlib.contextmanager
def held_by(cluster: Served) -> Iterator[dict[str, int]]:
    """The block enters how many tokens each worker comes to hold; it is left once the router believes so."""

    def believed(worker: str) -> float:
        return metric(cluster, "baton_mirror_blocks", f'worker="{worker}"')

    # The status may not list a worker whose lease has just been late; its blocks are counted all the same.
    workers = set(re.findall(r'^baton_mirror_blocks\{[^}]*worker="([^"]+)"', exposition(cluster), re.MULTILINE))
    before = {worker: believed(worker) for worker in workers}
    num_tokens: dict[str, int] = {}
    yield num_tokens
    wait_until(
        lambda: all(believed(worker) >= before.get(worker, 0.0) + count // 16 for worker, count in num_tokens.items()),
        60.0,
        seen=lambda: {worker: believed(worker) for worker in num_tokens},
    )
