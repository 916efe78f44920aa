"""Any precision: our engine with weights made smaller against the best of others, whatever they compute in.

Measured as `engine` measures. In the same run the predictions of each of ours are compared with exact weights', and no
gate is kept by one that predicts too differently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench import engine_peers, quality
from tests.bench.engine_cases import LONG_TEXT, PARTS, Found, Plan, cases, measure, measurements
from tests.bench.engine_sides import PROMPT_TOKENS, Baton, Side, Transformers
from tests.bench.quality import Quality
from tests.bench.report import Report, Table
from tests.bench.stats import verdict

EXACT = "baton"
SMALLER = {
    "baton, bf16": ("bf16", "auto"),
    "baton, bf16, KV bfloat16": ("bf16", "bfloat16"),
    "baton, int8g": ("int8g", "auto"),
    "baton, int8g, KV int8": ("int8g", "int8"),
}
"""Sides of ours: name -> `model.weights` and `engine.kv_dtype`."""


def run(quick: bool, parts: Collection[str] = PARTS) -> Report:
    cache = cache_dir(load().cluster)
    path = resolve(ModelConfig(), cache).path
    tokenizer, num_steps = Tokenizer.load(path), 12 if quick else 32
    plan = Plan.of(quick, (EXACT, *SMALLER))
    with ExitStack() as stack:
        exact = Baton(path)
        smaller = {name: Baton(path, weights=weights, kv_dtype=kv) for name, (weights, kv) in SMALLER.items()}
        peers = stack.enter_context(engine_peers.started(path, cache))
        sides: dict[str, Side] = {EXACT: exact, **smaller, "generate": Transformers(path), **peers.sides}
        found = [measure(case, sides, plan) for case in cases(tokenizer.encode(LONG_TEXT), parts, num_steps)]
    texts = quality.passages()[: 4 if quick else quality.NUM_PASSAGES]
    prompts = [tokenizer.encode(text)[: quality.PASSAGE_TOKENS] for text in texts]
    qualities = {name: quality.compared(exact.runner, side.runner, prompts) for name, side in smaller.items()}
    title = (
        f"Engine, any precision: SmolLM2-135M, 1 thread each, {PROMPT_TOKENS}-token prompts, {num_steps} steps, "
        f"{plan.num_rounds} rounds"
    )
    tables = [measurements(title, found, sides, "baton, int8g", EXACT), _gates(found, sides, qualities)]
    return Report("any_precision", [*tables, quality.table(qualities), peers.table()])


def _gates(found: Sequence[Found], sides: Mapping[str, Side], qualities: Mapping[str, Quality]) -> Table:
    """Each of ours against the best of others, in the rounds of one case, with how near its predictions are."""
    columns = (
        "",
        "the best of others",
        "its precision",
        "times",
        "by CPU time",
        "KL",
        "same top token",
        "gate",
        "kept",
    )
    table = Table("Gates: ours as a multiple of the best of others at any precision", columns)
    others = [name for name in sides if name != EXACT and name not in qualities]
    for of_case in found:
        best = of_case.best(others)
        for ours in (EXACT, *qualities):
            times, near = of_case.ratio(best, ours), qualities.get(ours)
            # Exact weights have a gate at one stream alone.
            has_gate = near is not None or (of_case.case.num_steps > 0 and of_case.case.size == 1)
            is_kept = times.median >= 1 and (near is None or near.is_near)
            table.rows.append((
                f"{of_case.case.name}: {ours}",
                best,
                sides[best].precision,
                times,
                of_case.cpu_ratio(best, ours),
                f"{near.divergence:.4f}" if near else "",
                f"{near.agreement:.4f}" if near else "",
                ">= 1" if has_gate else "",
                verdict(is_kept, of_case.foreign_cores) if has_gate else "",
            ))  # fmt: skip
    return table
