"""What it takes to know which tokens may come next in a structure, by the size of the vocabulary: of `sampling`."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from baton.sampling import SamplingParams
from baton.structure import StructuredOutputs
from engine.sampling.steps import Row
from engine.sampling.structure import Structures
from tests.bench.report import Table

VOCAB_SIZES = (49_152, 150_000)
NUM_TOKENS = 200
"""Most tokens of an answer."""
EOS = 2


def table(tokenizer: Path, structures: dict[str, StructuredOutputs], quick: bool) -> Table:
    """Args:
    tokenizer: a tokenizer.json of 49,152 tokens; the larger vocabulary is made of it.
    structures: by their names.
    """
    num_answers = 2 if quick else 10
    found = Table(
        f"Masks, of a row: {num_answers} answers of up to {NUM_TOKENS} random tokens",
        ("", "tokens", "µs a token p50", "p99", "longest"),
        note="The step's forward pass hides it: it is computed beside.",
    )
    with tempfile.TemporaryDirectory() as folder:
        for vocab_size in VOCAB_SIZES:
            path = _grown(tokenizer, vocab_size, Path(folder))
            for name, structure in structures.items():
                took_s = [
                    seconds for seed in range(num_answers) for seconds in _answer_s(path, vocab_size, structure, seed)
                ]
                ordered = sorted(took_s)
                shown = (statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1])
                found.rows.append((name, f"{vocab_size:,}", *(f"{seconds * 1e6:.0f}" for seconds in shown)))
    return found


def _answer_s(path: Path, vocab_size: int, structure: StructuredOutputs, seed: int) -> list[float]:
    """Returns what each mask of an answer took."""
    params = SamplingParams(seed=seed, max_tokens=NUM_TOKENS, structured_outputs=structure)
    structures, draw, took_s = _structures(path, vocab_size), random.Random(seed), []
    answer: tuple[int, ...] = ()
    for _ in range(NUM_TOKENS):
        row = Row(params, 0, 1 + len(answer), 1, (5, *answer), sequence_key=seed)
        began_s = time.perf_counter()
        masks = structures.masks({0: row})
        took_s.append(time.perf_counter() - began_s)
        token_id = int(draw.choice(np.flatnonzero(masks.allowed[0])))
        if token_id == EOS:
            break
        answer = (*answer, token_id)
    return took_s[1:]  # the first one compiles


_MADE: dict[Path, Structures] = {}


def _structures(path: Path, vocab_size: int) -> Structures:
    """Those of a tokenizer, which takes a second to read."""
    if path not in _MADE:
        _MADE[path] = Structures(path, vocab_size, (EOS,))
    return _MADE[path]


def _grown(tokenizer: Path, vocab_size: int, folder: Path) -> Path:
    """Returns a tokenizer with so many tokens: the new ones are pairs of those that there are."""
    described = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    special = {token["content"] for token in described["added_tokens"]}
    parts, draw = sorted(vocabulary.keys() - special), random.Random(0)
    while len(vocabulary) < vocab_size:
        left, right = draw.choice(parts), draw.choice(parts)
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
    path = folder / f"{vocab_size}.json"
    path.write_text(json.dumps(described), encoding="utf-8")
    return path
