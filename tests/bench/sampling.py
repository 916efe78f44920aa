"""What each way of drawing adds to a decode step: 16 streams of the default model, against 16 greedy ones."""

from __future__ import annotations

import json
from dataclasses import replace

from baton.config import ModelConfig, load
from baton.sampling import SamplingParams
from baton.structure import StructuredOutputs
from deploy.models import cache_dir, resolve
from router.prompt import Tokenizer
from tests.bench import first_tokens, masks
from tests.bench.engine_sides import GREEDY, PROMPT_TOKENS, TEXT, Baton, Measured
from tests.bench.report import Report, Table
from tests.bench.stats import Spread, interleaved, ratio, spread

NUM_STREAMS = 16
EVERYTHING = replace(
    GREEDY,
    temperature=1.0,
    min_p=0.05,
    typical_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias=tuple((token_id, 1.0) for token_id in range(100, 400)),
)
LIST = json.dumps({
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
        "required": ["name", "kind"],
    },
    "minItems": 1000,
})  # fmt: skip
"""A schema of which no answer ends during the measurement."""
SCHEMA = StructuredOutputs(json=LIST)
STRUCTURES = {
    "a JSON schema": SCHEMA,
    "any JSON object": StructuredOutputs(json_object=True),
    "a regular expression": StructuredOutputs(regex=r"([a-z]{2,9} [0-9]{1,3}, ){200}"),
}
ALL = replace(EVERYTHING, logprobs=5, structured_outputs=SCHEMA, ignore_eos=False)
CASES: dict[str, tuple[tuple[SamplingParams, ...], str]] = {
    "greedy, again": ((GREEDY,), ""),
    "temperature 1": ((replace(GREEDY, temperature=1.0),), ""),
    "temperature 1, top-p 0.95": ((replace(GREEDY, temperature=1.0, top_p=0.95),), "<= 1.05"),
    "temperature 1.3, top-p 0.95": ((replace(GREEDY, temperature=1.3, top_p=0.95),), "<= 1.08"),
    "temperature 2, top-p 0.95": ((replace(GREEDY, temperature=2.0, top_p=0.95),), "<= 1.08"),
    "temperature 1, top-k 50": ((replace(GREEDY, temperature=1.0, top_k=50),), ""),
    "penalties": ((replace(GREEDY, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),), ""),
    "typical": ((replace(GREEDY, temperature=1.0, typical_p=0.9),), ""),
    "DRY and XTC": ((replace(GREEDY, temperature=1.0, dry_multiplier=0.8, xtc_probability=0.5),), ""),
    "penalties, bias, min-p, typical": ((EVERYTHING,), ""),
    "5 log probabilities": ((replace(GREEDY, logprobs=5),), ""),
    "a JSON schema": ((replace(GREEDY, structured_outputs=SCHEMA, ignore_eos=False),), ""),
    "the four, 5 log probabilities, a schema": ((ALL,), "<= 1.10"),
    "all that, one row of 16": ((ALL, *[GREEDY] * (NUM_STREAMS - 1)), "<= 1.02"),
}

WIDTH = 4
CHOICE = replace(GREEDY, temperature=1.0)
SEARCH = replace(GREEDY, use_beam_search=True, beam_width=WIDTH)
SEARCHES: dict[str, tuple[int, SamplingParams, str]] = {
    f"{WIDTH} choices": (WIDTH, CHOICE, ""),
    f"a search of {WIDTH} beams": (1, SEARCH, "<= 1.15"),
    f"{NUM_STREAMS} choices": (NUM_STREAMS, CHOICE, ""),
    f"{NUM_STREAMS // WIDTH} searches of {WIDTH} beams": (NUM_STREAMS // WIDTH, SEARCH, "<= 1.15"),
}
"""What each pair is made of: prompts, and how they are answered. The second is compared with the first."""


def _row(
    name: str, runs: list[Measured], reference: list[Measured], num_steps: int, gate: str
) -> tuple[str | Spread, ...]:
    return (
        name,
        spread([run.wall_s * 1e3 / num_steps for run in runs]),
        ratio([run.wall_s for run in runs], [run.wall_s for run in reference]),
        ratio([run.cpu_s for run in runs], [run.cpu_s for run in reference]),
        gate,
    )


def _beams(engine: Baton, prompt: list[int], num_rounds: int, num_steps: int) -> Table:
    found: dict[str, list[Measured]] = {name: [] for name in SEARCHES}
    for name in interleaved(tuple(SEARCHES), num_rounds):
        num_prompts, sampling, _ = SEARCHES[name]
        found[name].append(engine.decode([prompt] * num_prompts, num_steps, (sampling,)))
    table = Table("Beams: the same, of one prompt", ("", "ms a step", "to the choices", "CPU to theirs", "gate"))
    choices: list[Measured] = []
    for name, (_, sampling, gate) in SEARCHES.items():
        runs = found[name]
        choices = choices if sampling.use_beam_search else runs
        table.rows.append(_row(name, runs, choices, num_steps, gate))
    return table


def run(quick: bool) -> Report:
    path = resolve(ModelConfig(), cache_dir(load().cluster)).path
    num_rounds, num_steps = (2, 8) if quick else (7, 32)
    ids = Tokenizer.load(path).encode(TEXT * 40)
    prompts = [ids[7 * i : 7 * i + PROMPT_TOKENS] for i in range(NUM_STREAMS)]
    engine = Baton(path)
    arms = {"greedy": (GREEDY,), **{name: samplings for name, (samplings, _) in CASES.items()}}
    engine.decode(prompts, num_steps)  # warm up
    found: dict[str, list[Measured]] = {name: [] for name in arms}
    for name in interleaved(tuple(arms), num_rounds):
        found[name].append(engine.decode(prompts, num_steps, arms[name]))
    greedy = found["greedy"]
    table = Table(
        f"Sampling: SmolLM2-135M, float32, 1 thread, {NUM_STREAMS} streams, {num_steps} steps, {num_rounds} rounds",
        ("", "ms a step", "to greedy", "CPU to greedy", "gate"),
    )
    for name, (_, gate) in CASES.items():
        table.rows.append(_row(name, found[name], greedy, num_steps, gate))
    beams = _beams(engine, prompts[0], num_rounds, num_steps)
    masked = masks.table(path / "tokenizer.json", STRUCTURES, quick)
    return Report("sampling", [table, beams, masked, first_tokens.table(quick)])
