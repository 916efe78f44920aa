"""Structured outputs: masks of the tokens that may come next, including a reasoning before the structure.

The state of a response is a function of its tokens: a grammar is replayed when a sequence migrates to this worker.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import InvalidRequest
from baton.sampling import SamplingParams
from baton.structure import StructuredOutputs
from engine.sampling.steps import EXCLUDED, Row

if TYPE_CHECKING:
    from baton.grammar import GrammarCompiler, GrammarMatcher

logger = logging.getLogger(__name__)
MAX_KEPT = 256
"""Number of responses whose grammar state is kept between steps; for others the tokens are replayed."""
MAX_COMPILED = 128
"""Number of structures that are kept compiled."""
_Allowed = npt.NDArray[np.bool_]
"""Array over the vocabulary: whether each token may come next."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Token masks of a step's rows."""

    allowed: Mapping[int, _Allowed]
    """Masks of the constrained rows, by row index: for each token of the vocabulary, whether it is allowed."""
    failures: Mapping[int, str]
    """Errors of rows whose mask cannot be computed, by row index."""


class Structures:
    """Structures of a model's responses. It compiles in any thread, and tracks responses in a thread of its own.

    Args:
        tokenizer: the model's tokenizer.json; None: the model has no texts, and so no structured responses.
        vocab_size: number of logits per row.
        eos_token_ids: tokens that end every response.
    """

    def __init__(self, tokenizer: Path | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[StructuredOutputs, GrammarMatcher] = OrderedDict()
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        self._unended = np.ones(vocab_size, np.bool_)
        self._unended[list(eos_token_ids)] = False
        self._thread = ThreadPoolExecutor(1, "structures")
        self._begun: Future[Masks] | None = None

    def load(self) -> None:
        """Read the tokenizer now instead of at the first structure; this holds the GIL for 0.1 to 2 seconds.

        If it cannot be read, a warning is logged, and the first structure is refused.
        """
        if self._tokenizer is None:
            return
        try:
            with self._lock:
                self._compiler = self._compiler or self._load()
        except InvalidRequest as error:
            logger.warning("structured outputs are not available: %s", error)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the structure of these parameters.

        Raises:
            InvalidRequest: the structure cannot be supported.
        """
        if params.structured_outputs is not None:
            self._matcher(params.structured_outputs)

    def begin(self, rows: Mapping[int, Row]) -> None:
        """Start to compute the masks of a step's rows while their logits are computed."""
        self._begun = self._thread.submit(self._masks, rows)

    def masks(self, rows: Mapping[int, Row]) -> Masks:
        """Return the masks of a step's rows; after `begin` they must be the same rows."""
        begun, self._begun = self._begun, None
        return begun.result() if begun is not None else self._masks(rows)

    def _masks(self, rows: Mapping[int, Row]) -> Masks:
        allowed, failures = {}, {}
        for index, row in rows.items():
            try:
                mask = self._answer(row).mask()
            except InvalidRequest as error:
                failures[index] = str(error)
                continue
            if mask is not None:
                allowed[index] = mask
        return Masks(allowed, failures)

    def _answer(self, row: Row) -> _Answer:
        answer = self._answers.pop(row.sequence_key, None)
        if answer is None or row.sequence_key < 0:
            structure = row.sampling.structured_outputs
            matcher = None if structure is None else self._matcher(structure).copy()
            answer = _Answer(matcher, row.sampling, self._unended)
        answer.take(row.history[row.num_prompt_tokens + answer.num_tokens :])
        self._answers[row.sequence_key] = answer
        if len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
        return answer

    def _matcher(self, structure: StructuredOutputs) -> GrammarMatcher:
        with self._lock:
            if found := self._compiled.get(structure):
                self._compiled.move_to_end(structure)
                return found
            if self._compiler is None:
                self._compiler = self._load()
        found = self._compiler.compile(structure)  # without the lock: it takes up to a second, and steps continue
        with self._lock:
            self._compiled[structure] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def _load(self) -> GrammarCompiler:
        if self._tokenizer is None:
            raise InvalidRequest("structured outputs are not available: the worker's model has no tokenizer")
        from baton.grammar import GrammarCompiler  # most workers never need it

        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)


class _Answer:
    """State of a response in its structure."""

    def __init__(self, matcher: GrammarMatcher | None, params: SamplingParams, unended: _Allowed) -> None:
        """Args:
        unended: mask of the tokens that do not end a response.
        """
        self.num_tokens = 0
        self._matcher = matcher
        self._unended = unended
        self._begin_id = params.reasoning_begin_id
        """Token that may start a reasoning, while nothing has been generated; then None."""
        self._end_ids = params.reasoning_end_ids
        self._budget = params.thinking_budget
        self._num_reasoning = 0
        self._last: tuple[int, ...] = ()
        """Last tokens while it reasons, fewer than the sequence that ends the reasoning."""
        self._reasons = bool(self._end_ids) and self._begin_id is None

    def take(self, token_ids: tuple[int, ...]) -> None:
        """Process the new tokens."""
        self.num_tokens += len(token_ids)
        for place, token_id in enumerate(token_ids):
            if self._begin_id is not None:
                self._reasons, self._begin_id = token_id == self._begin_id, None
                if self._reasons:
                    continue
            if not self._reasons:
                if self._matcher is not None:
                    self._matcher.take(token_ids[place:])
                return
            self._num_reasoning += 1
            self._last = (*self._last, token_id)[-len(self._end_ids) :]
            self._reasons = self._last != self._end_ids

    def mask(self) -> _Allowed | None:
        """Return which tokens may come next; None: all. Raise InvalidRequest if the grammar has become too large."""
        if self._reasons:
            if self._budget is not None and self._num_reasoning >= self._budget:
                return self._forced()
            return None if self._matcher is None else self._unended  # it must not end before its structure
        if self._matcher is None:
            return None
        bits = np.frombuffer(self._matcher.allowed(), np.uint8)
        allowed = np.unpackbits(bits, count=len(self._unended), bitorder="little").view(np.bool_)
        if self._begin_id is not None:
            allowed[self._begin_id] = True
        return allowed

    def _forced(self) -> _Allowed:
        """Allow only the next token of the sequence that ends the reasoning; its first tokens may already be there."""
        lengths = range(min(len(self._end_ids) - 1, len(self._last)), 0, -1)
        num_there = next((n for n in lengths if self._last[-n:] == self._end_ids[:n]), 0)
        allowed = np.zeros_like(self._unended)
        allowed[self._end_ids[num_there]] = True
        return allowed


def apply(logits: torch.Tensor, masks: Masks) -> None:
    """Change float32 logits `[rows, vocab_size]` in place.

    If other stages have excluded every token that a structure allows, these tokens become equally likely.
    """
    for index, allowed in masks.allowed.items():
        row = logits[index]
        is_allowed = torch.from_numpy(allowed).to(row.device)
        row.masked_fill_(~is_allowed, EXCLUDED)
        if not row.amax() > EXCLUDED:  # also for NaN
            row.masked_fill_(is_allowed, 0.0)
