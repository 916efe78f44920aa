"""How much later the first tokens of several answers come than that of one; part of `sampling`."""

from __future__ import annotations

import random
import time

from tests.bench.report import Table
from tests.bench.stats import interleaved, ratio, spread
from tests.integration.cluster import Cluster, request, running_cluster

NUM_PROMPT_TOKENS = 400
NUM_CHOICES = 8
MODES = {"disaggregated": "1", "aggregated": "0"}
"""Prefill workers of a cluster with one decode worker."""


def table(quick: bool) -> Table:
    num_rounds = 3 if quick else 15
    found = Table(
        f"First tokens of {NUM_CHOICES} answers to {NUM_PROMPT_TOKENS} tokens: SmolLM2-135M, {num_rounds} rounds",
        ("", "one answer, ms", "all first tokens, ms", "to one", "gate"),
    )
    for mode, num_prefill in MODES.items():
        with running_cluster("--prefill", num_prefill, "--decode", "1", router_mode=mode) as cluster:
            for warming in (1, NUM_CHOICES):
                _first_tokens_s(cluster, warming)
            took: dict[str, list[float]] = {"one": [], "all": []}
            for arm in interleaved(tuple(took), num_rounds):
                took[arm].append(_first_tokens_s(cluster, 1 if arm == "one" else NUM_CHOICES))
        one_ms, all_ms = ([seconds * 1e3 for seconds in took[arm]] for arm in took)
        found.rows.append((mode, spread(one_ms), spread(all_ms), ratio(all_ms, one_ms), "<= 1.3"))
    return found


def _first_tokens_s(cluster: Cluster, num_choices: int) -> float:
    """Returns the time until each choice has its first token, for a prompt that no cache has."""
    prompt = random.choices(range(1000, 40_000), k=NUM_PROMPT_TOKENS)
    sampling = {"temperature": 1.0, "n": num_choices, "max_tokens": 4, "ignore_eos": True}
    began_s, begun = time.monotonic(), set[int]()
    took_s = 0.0
    for message in cluster.inference.Generate(request(token_ids=prompt, sampling=sampling), timeout=120):
        begun.add(message.choice_index)
        if len(begun) == num_choices and not took_s:
            took_s = time.monotonic() - began_s
    return took_s
