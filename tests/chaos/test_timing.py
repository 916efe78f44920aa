"""What a tenant can learn by the clock: whether a prompt of another one came before. It cannot.

PAIRS is the number of measurements of each kind (make chaos: 500).
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from tests.chaos.fleet import RouterProcess, running_fleet
from tests.integration.cluster import request
from tests.support.asking import sampling
from tests.support.operator import OPERATOR_ENTRY

PAIRS = int(os.environ.get("PAIRS", "500"))
KEYS = {name: f"key-of-{name}" for name in ("owner", "stranger")}
LEAST_P = 0.01
WORDS = [f"{a}{b}" for a in ("red", "blue", "old", "new", "far", "low") for b in ("fish", "tree", "stone", "road")]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    lines = [f"{name}: {{key_sha256: [{hashlib.sha256(key.encode()).hexdigest()}]}}" for name, key in KEYS.items()]
    path.write_text(OPERATOR_ENTRY + "\n".join(lines))
    config = RouterConfig(mode="auto", tenants_file=str(path))
    with running_fleet(TransferConfig(), config, token_ms=0.02) as fleet:
        yield fleet.fill(*Role)


def ids_of(seed: int) -> dict[str, object]:
    return {"token_ids": [random.Random(seed).randrange(1000, 9000) for _ in range(400)]}


def text_of(seed: int) -> dict[str, object]:
    return {"text": " ".join(random.Random(seed).choices(WORDS, k=400))}


def ttft_s(router: RouterProcess, tenant: str, prompt: dict[str, object]) -> float:
    """The time until the first token of a greedy answer, as its client sees it."""
    message = request(**prompt, sampling=sampling(1))
    began_s = time.perf_counter()
    stream = router.inference.Generate(message, timeout=60, metadata=(("authorization", f"Bearer {KEYS[tenant]}"),))
    next(stream)
    took_s = time.perf_counter() - began_s
    for _ in stream:
        pass
    return took_s


def measured(
    router: RouterProcess, asker: str, prompt_of: Callable[[int], dict[str, object]]
) -> tuple[list[float], list[float]]:
    """TTFTs of prompts that the owner has sent before, and of new ones, by turns in a random order."""
    order, first = random.Random(7), random.randrange(2**30)
    seen: list[float] = []
    new: list[float] = []
    for pair in range(PAIRS):
        known, unknown = first + 2 * pair, first + 2 * pair + 1
        ttft_s(router, "owner", prompt_of(known))
        turns = [(known, seen), (unknown, new)]
        order.shuffle(turns)
        for seed, found in turns:
            found.append(ttft_s(router, asker, prompt_of(seed)))
    return seen, new


def mann_whitney_p(one: list[float], other: list[float]) -> float:
    """The two-sided p of the rank-sum test in its normal approximation, without ties."""
    ranked = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    u = sum(rank for rank, (_, which) in enumerate(ranked, 1) if which == 0) - len(one) * (len(one) + 1) / 2
    mean = len(one) * len(other) / 2
    deviation = math.sqrt(mean * (len(one) + len(other) + 1) / 6)
    return math.erfc(abs(u - mean) / deviation / math.sqrt(2))


@pytest.mark.parametrize("prompt_of", [ids_of, text_of])
def test_another_tenants_prompts_cannot_be_found_by_the_clock(
    router: RouterProcess, prompt_of: Callable[[int], dict[str, object]]
) -> None:
    seen, new = measured(router, "owner", prompt_of)
    told_apart = mann_whitney_p(seen, new)
    print(f"{prompt_of.__name__}: its owner: {median_ms(seen):.2f} ms, new {median_ms(new):.2f} ms, p {told_apart:.1e}")
    assert told_apart < 1e-6, "the measurement sees nothing"
    found = []
    for _ in range(2):  # once more after a small p: chance alone gives one in a hundred
        seen, new = measured(router, "stranger", prompt_of)
        found.append(mann_whitney_p(seen, new))
        print(f"{prompt_of.__name__}: a stranger: {median_ms(seen):.2f} ms, new {median_ms(new):.2f} ms, p {found}")
        if found[-1] > LEAST_P:
            return
    pytest.fail(f"told apart twice: p {found}")


def median_ms(found: list[float]) -> float:
    return 1e3 * sorted(found)[len(found) // 2]
