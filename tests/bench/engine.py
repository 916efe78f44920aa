"""Exact mode: our engine as `engine.runner: auto` chooses, against its transformers runner, `generate` and engines of
other makes that compute in float32.

All have the same weights, prompts, steps and one thread, and take turns in each round. Decoding is timed from the
moment every stream has its first token, over the same number of steps at full batch; prefill from the prompt to its
first token. The tokens are compared too: all must do the same work. A case during which other processes were busy is
measured again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench import engine_peers, roofline
from tests.bench.engine_cases import LONG_PROMPTS, LONG_TEXT, PARTS, Found, Plan, cases, measure, measurements
from tests.bench.engine_sides import PROMPT_TOKENS, Baton, Side, Transformers
from tests.bench.report import Report, Table
from tests.bench.stats import verdict

OURS, RUNNER, GENERATE = "baton", "baton on transformers", "generate"
EXACT_GATES = {1: 1.6, 8: 1.3, 16: 1.3, **dict.fromkeys(LONG_PROMPTS, 1.05)}
"""Times the best float32 engine of others, by streams or tokens of the prompt."""
RUNNER_GATES = {1: 4.0, 8: 2.5, 16: 2.0, **dict.fromkeys(LONG_PROMPTS, 1.3)}


def run(quick: bool, parts: Collection[str] = PARTS) -> Report:
    cache = cache_dir(load().cluster)
    path = resolve(ModelConfig(), cache).path
    num_steps = 12 if quick else 32
    plan = Plan.of(quick, (OURS, RUNNER))
    with ExitStack() as stack:
        ours = Baton(path)
        sides: dict[str, Side] = {OURS: ours, RUNNER: Baton(path, "transformers"), GENERATE: Transformers(path)}
        peers = stack.enter_context(engine_peers.started(path, cache, float32_only=True))
        sides |= peers.sides
        found = [measure(case, sides, plan) for case in cases(Tokenizer.load(path).encode(LONG_TEXT), parts, num_steps)]
    title = (
        f"Engine, float32: SmolLM2-135M, 1 thread each, {PROMPT_TOKENS}-token prompts, {num_steps} steps, "
        f"{plan.num_rounds} rounds"
    )
    decodes = {
        (each.case.size, PROMPT_TOKENS + 1 + num_steps / 2): each.runs[OURS] for each in found if each.case.num_steps
    }
    prefills = {each.case.size: each.runs[OURS] for each in found if not each.case.num_steps}
    tables = [measurements(title, found, sides, OURS, GENERATE), _gates(found, sides)]
    return Report("engine", [*tables, roofline.table(ours.runner, decodes, prefills, quick), peers.table()])


def _gates(found: Sequence[Found], sides: Mapping[str, Side]) -> Table:
    """What the design asks for, each in the rounds of one case."""
    table = Table("Gates: ours as a multiple of", ("", "which", "times", "by CPU time", "gate", "kept"))
    others = [name for name in sides if name not in (OURS, RUNNER)]
    for of_case in found:
        size = of_case.case.size
        for what, name, gate in (
            ("the best float32 engine of others", of_case.best(others), EXACT_GATES[size]),
            ("our transformers runner", RUNNER, RUNNER_GATES[size]),
        ):
            times = of_case.ratio(name, OURS)
            table.rows.append((
                f"{of_case.case.name}: {what}",
                name,
                times,
                of_case.cpu_ratio(name, OURS),
                f">= {gate}",
                verdict(times.median >= gate, of_case.foreign_cores),
            ))  # fmt: skip
    return table
