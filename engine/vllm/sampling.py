"""Baton's sampler inside vLLM's step: it draws each token, and excludes all others.

vLLM calls its logits processors in the process of every rank, with equal logits. This one draws as Baton's own engines
do, by the request's seed and the token's position, and excludes every other token. vLLM then selects the likeliest
token, which is the drawn one. So a sampled response continues on another worker with the same tokens. Earlier draws
of that worker have no influence.

vLLM's own sampling parameters are greedy for every sequence. The processor does not change the logits of a greedy
sequence without other parameters.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from baton.parent import die_with
from baton.sampling import SamplingParams
from engine.sampling.pipeline import Sampler
from engine.sampling.steps import Row
from engine.sampling.structure import Structures

SETTINGS = "BATON_VLLM_SAMPLER"
"""Environment variable with the `SamplerSettings` as JSON. The processes of vLLM's ranks inherit it."""
ARGUMENT = "baton"
"""Key of a sequence's `Drawing` in vLLM's `SamplingParams.extra_args`."""


class SamplerSettings(NamedTuple):
    """Properties of the model that the sampler needs."""

    folder: str
    eos_token_ids: list[int]
    failures: str
    """Path of `messages.FAILURES`: sequences for which the sampler cannot draw a token."""


class Drawing(NamedTuple):
    """Parameters that decide a sequence's tokens."""

    key: int
    sampling: SamplingParams = SamplingParams(temperature=0.0)
    choice_index: int = 0
    num_prompt_tokens: int = 0
    forced: int = -1
    """First token of the output, if another worker has drawn it; -1: this worker draws it."""


@dataclass(slots=True)
class _Drawn:
    drawing: Drawing
    prompt: tuple[int, ...]
    output: list[int]
    """vLLM's own list, to which it appends."""

    @property
    def is_forced(self) -> bool:
        """True if another worker has drawn the next token."""
        return self.drawing.forced >= 0 and not self.output

    def row(self) -> Row:
        """Return the values that decide the next token in addition to the logits."""
        position = len(self.prompt) + len(self.output)
        drawing = self.drawing
        history = (*self.prompt, *self.output) if drawing.sampling.needs_history else ()
        return Row(drawing.sampling, drawing.choice_index, position, drawing.num_prompt_tokens, history, drawing.key)


def is_drawn_by_vllm(params: SamplingParams) -> bool:
    """Return whether vLLM needs no sampler: the tokens are the likeliest ones of the unchanged logits."""
    return params.temperature == 0 and not params.adjusts_logits and not params.is_structured


@functools.cache
def structures_of(folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Structures:
    """Return the cache of compiled structures of this process. The host compiles before it adds a sequence."""
    tokenizer = Path(folder) / "tokenizer.json"
    return Structures(tokenizer if tokenizer.exists() else None, vocab_size, eos_token_ids)


class BatonSampler(LogitsProcessor):
    """Baton's sampler as one of vLLM's logits processors."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        if host := multiprocessing.parent_process():  # this is one of several ranks
            die_with(host.pid or 0)  # vLLM ends them by a thread, for which one that hangs in a kernel does not end
        settings = SamplerSettings(*json.loads(os.environ[SETTINGS]))
        vocab_size = vllm_config.model_config.get_vocab_size()
        eos_token_ids = tuple(token for token in settings.eos_token_ids if token < vocab_size)
        structures = structures_of(settings.folder, vocab_size, eos_token_ids)
        self._sampler = Sampler(eos_token_ids, structures)
        self._failures = settings.failures
        self._drawn: dict[int, _Drawn] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor decides which token is the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the sequences' indices in the batch."""
        if batch_update is None:
            return
        drawn = self._drawn
        for index in batch_update.removed:
            drawn.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            drawing = (params.extra_args or {}).get(ARGUMENT)
            if drawing is None:
                drawn.pop(index, None)
            else:
                drawn[index] = _Drawn(Drawing(*drawing), tuple(prompt or ()), output)
        for one, other, direction in batch_update.moved:
            moved, replaced = drawn.pop(one, None), drawn.pop(other, None)
            if moved is not None:
                drawn[other] = moved
            if direction is MoveDirectionality.SWAP and replaced is not None:
                drawn[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token for each sequence, and exclude all others.

        Args:
            logits: `[sequences, vocab_size]` in float32; changed in place.
        """
        forced = {index: drawn.drawing.forced for index, drawn in self._drawn.items() if drawn.is_forced}
        for index, token in forced.items():
            logits[index] = -torch.inf
            logits[index, token] = 0.0
        rows_by_index = {
            index: drawn.row()
            for index, drawn in self._drawn.items()
            if index not in forced and not is_drawn_by_vllm(drawn.drawing.sampling)
        }
        if not rows_by_index:
            return logits
        rows = list(rows_by_index.values())
        places = torch.tensor(list(rows_by_index), device=logits.device)
        asked = logits.index_select(0, places)
        if any(row.sampling.is_structured for row in rows):
            sampled = self._sampler.sample_and_score(asked, rows)
            self._report({rows[place].sequence_key: reason for place, reason in sampled.failures.items()})
            tokens = torch.tensor(sampled.token_ids, device=logits.device)
        elif logits.device.type == "cpu":
            tokens = torch.tensor(self._sampler.sample(asked, rows))
        else:
            tokens = self._sampler.tokens(asked, rows)
        logits[places] = -torch.inf
        logits[places, tokens] = 0.0
        return logits

    def _report(self, failures: dict[int, str]) -> None:
        """Report the sequences without a token to the host, which ends them."""
        if not failures or get_tensor_model_parallel_rank():
            return
        with Path(self._failures).open("a") as file:
            file.write("".join(f"{json.dumps(failure)}\n" for failure in failures.items()))
