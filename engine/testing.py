"""Arithmetic model: its output can be computed by hand, and it uses a real KV cache.

    next token = (sum over positions p of (p + 1) * token_p + state + adapter) mod the largest prime up to vocab_size

K holds the token and V holds (p + 1) * token + adapter, in every layer; `state`, if there is one, is the running sum of
all tokens; `adapter` is a number made of the digest of the sequence's adapter, 0 without one. The next token comes from
K of the first layer, plus one for every position at which another page disagrees. So a block that is lost, stale,
swapped or altered, in any layer, changes the output, as with a real model, and tests of scheduling, KV transfer and
streaming need no weights. With a window, one more layer sees only the last tokens: the positions in it that disagree
count. A worker runs it if `testing.arithmetic` is set.

The modulus is a prime because each output token is a multiple of the one before by its position. Modulo 49152, which
two to the power of 14 divides, all tokens after about 16 would be 0, and a lost or repeated one would not be noticed.

An image stands in a prompt as one token per eight bytes of its file. They are the placeholder, but for the last one,
which depends on the image's digest; so prompts with two images of one size differ in one token.

The next token has the highest logit, and each token after it 0.1 less, wrapping around at the end of the vocabulary.
Sampling, penalties and exclusions work on these logits, with the sampler of the real models.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch

from baton.adapters import AdapterFacts, load_registered, read_adapter, require_rank
from baton.blocks import num_blocks_for
from baton.cluster import Computes
from baton.config import EngineConfig, ModelConfig, TestingConfig
from baton.errors import InvalidRequest
from baton.messages import Adapter
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, Sampled, TokenScores
from engine.core.image_store import ImageStore, ReadImage
from engine.core.runner import (
    EMPTY_PLACE,
    ComputedStep,
    KVSpec,
    LayerGroup,
    OnLayerDone,
    StateSpec,
    StepInput,
    StepOutput,
    StepPart,
    ignore_layer,
)
from engine.model.kv_cache import KVCache
from engine.model.logits_runner import drawn, rows_of
from engine.model.rank_step import LastTokens
from engine.sampling.pipeline import SAMPLER, Sampler
from engine.sampling.scores import scores_of
from engine.sampling.steps import Row
from engine.sampling.structure import Structures

NUM_LAYERS, NUM_BLOCKS, MODEL_LEN = 2, 4096, 8192
"""Size of a worker's arithmetic model, unless its settings say otherwise."""
NUM_NEAR = 4096
"""Number of tokens next to the best one that have any weight at the highest temperature."""
FIRST_IMAGE_TOKEN, NUM_IMAGE_TOKENS = 1000, 30_000
"""Range of the tokens that tell images apart."""
NUM_ROWS_PER_SEQUENCE = 4
"""Rows of states: two for each sequence that runs, and as many snapshots."""


class ArithmeticRunner:
    """Runner of the arithmetic model; see the module's docstring. Token 0 is the only end token.

    Each layer of a step takes at least `layer_s`, and the whole step `token_s` for each token that it computes. This
    time is slept before a layer is written and stands for the computation.

    `tokenizer`, a tokenizer.json, gives its tokens the texts that structured outputs are made of.

    With an `image_placeholder` it takes images, and keeps `image_bytes` of them.
    """

    runs_ahead = False
    images: ImageStore | str = "the arithmetic engine has no encoder"
    unknown_settings = frozenset({"kv_cache_gib", "kv_dtype", "attention", "draft_model", "draft_kv_cache_gib"})
    """Settings that this engine does not support: its pool is counted in blocks, and no model is smaller."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        vocab_size: int = 49152,
        max_model_len: int = MODEL_LEN,
        max_num_seqs: int = 64,
        with_state: bool = False,
        window: int = 0,
        whole_prompts: bool = False,
        eos_token_ids: frozenset[int] = frozenset({0}),
        num_layers: int = NUM_LAYERS,
        layer_s: float = 0.0,
        token_s: float = 0.0,
        tokenizer: Path | None = None,
        max_adapters: int = 0,
        max_adapter_rank: int = 64,
        image_placeholder: int | None = None,
        image_bytes: int = 2**20,
    ) -> None:
        if image_placeholder is not None:
            reader = ArithmeticReader(image_placeholder)
            self.images = store = ImageStore(reader, lambda image: store.pixels(image.digest), image_bytes)
        states = (StateSpec("token_sum", (1,), "int64"),) if with_state else ()
        groups = [
            LayerGroup(
                name="all",
                layers=tuple(range(num_layers)),
                block_size=block_size,
                num_kv_heads=1,
                k_dim=1,
                v_dim=1,
                dtype="int64",
            )
        ]
        if window:
            groups.append(replace(groups[0], name="window", layers=(num_layers,), window=window))
        self.spec = KVSpec(tuple(groups), states, whole_prompts=whole_prompts)
        self.cache = KVCache(self.spec, num_blocks, NUM_ROWS_PER_SEQUENCE * max_num_seqs)
        self.caches = (self.cache,)
        self.num_blocks = self.cache.table_sizes
        self.name = "arithmetic"
        self.computes = Computes(dtype="int64", kv_dtype="int64")
        self.expert_tokens: SequenceOf[int] = ()
        self.sampler = SAMPLER
        self._structures = Structures(tokenizer, vocab_size, eos_token_ids)
        self._sampler = Sampler(eos_token_ids, self._structures)
        self.vocab_size = vocab_size
        self.max_model_len = min(max_model_len, num_blocks * block_size)
        self.eos_token_ids = eos_token_ids
        self.layer_s = layer_s
        self.num_start_tokens = 0
        self.canvas_length = 0
        self.token_s = token_s
        self._last_tokens = LastTokens()
        self.max_adapters = max_adapters
        self._max_adapter_rank = max_adapter_rank
        self._adapters = {0: 0}
        """Number of the adapter in each slot."""

    def check_adapter(self, path: str) -> AdapterFacts:
        """See `Runner.check_adapter`. Matrices of every shape fit this model."""
        facts = read_adapter(path)
        require_rank(facts, self._max_adapter_rank)
        return facts

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        """See `Runner.read_adapter`."""
        facts, _ = load_registered(adapter)
        return lambda slot: self._put_adapter(facts, slot)

    def _put_adapter(self, facts: AdapterFacts, slot: int) -> None:
        self._adapters[slot] = adapter_number(facts.digest)

    def prepare(self, params: SamplingParams) -> None:
        """See `Runner.prepare`."""
        self._structures.prepare(params)

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """See `Runner.execute`."""
        step = self._last_tokens.filled(step)
        self._compute(step, on_layer_done)
        answering = [part for part in step.parts if part.sample]

        def sample(places: SequenceOf[int], rows: SequenceOf[Row]) -> Sampled:
            return sampled_of(self._answers(answering, rows), rows, self._sampler, self.vocab_size)

        prompts = (
            [self._prompt_scores(part) for part in step.parts] if any(p.scores_prompt for p in step.parts) else None
        )
        output = StepOutput.of(step, drawn(answering, rows_of(answering), sample), prompts)
        self._last_tokens.keep(step, ComputedStep(output))
        return output

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> ComputedStep:
        """See `Runner.launch`."""
        return ComputedStep(self.execute(step, on_layer_done))

    def recover(self) -> None:
        """Do nothing: a step leaves nothing behind on a CPU."""

    def close(self) -> None:
        """Do nothing: no process was started."""

    def _pages(self, layer: int) -> torch.Tensor:
        """Return a layer as `[block, K or V, token]`."""
        return self.cache.layer(layer).view(-1, 2, self.spec.block_size)

    def _compute(self, step: StepInput, on_layer_done: OnLayerDone) -> None:
        """Perform the copies, and write KV and states."""
        self.cache.copy_blocks(step.copies)
        num_layers = self.spec.num_layers
        layer_s = self.layer_s + self.token_s * step.num_scheduled_tokens / num_layers
        for layer in range(num_layers):
            if layer_s:
                time.sleep(layer_s)
            for part in step.parts:
                self._write(layer, part)
            on_layer_done(layer, None)
        for state in self.cache.states.values():
            for part in step.parts:
                read, written = part.block_ids[-1][:2]
                assert (read == EMPTY_PLACE) == (part.num_computed_tokens == 0), "a state is of other tokens"
                state[written] = sum(part.token_ids) + (0 if read == EMPTY_PLACE else state[read])

    def _write(self, layer: int, part: StepPart) -> None:
        block_size, pages = self.spec.block_size, self._pages(layer)
        table = part.block_ids[self.cache.group_of(layer)]
        for position, token_id in enumerate(part.token_ids, part.num_computed_tokens):
            assert table[position // block_size] != EMPTY_PLACE, "a token has no place"
            page = pages[table[position // block_size]]
            page[0, position % block_size] = token_id
            page[1, position % block_size] = (position + 1) * token_id + self._adapters[part.adapter]

    def _prompt_scores(self, part: StepPart) -> TokenScores:
        if not (token_ids := part.scored_token_ids):
            return NO_SCORES
        ends = range(part.num_computed_tokens + 1, part.num_computed_tokens + 1 + len(token_ids))
        logits = logits_of([self._answer(part, end) for end in ends], self.vocab_size)
        return scores_of(logits, token_ids, part.sampling.prompt_logprobs or 0)

    def _answers(self, parts: SequenceOf[StepPart], rows: SequenceOf[Row]) -> list[int]:
        """Return the next token after the tokens before each row; each row belongs to one of these parts."""
        by_key = {part.sequence_key: part for part in parts}
        return [self._answer(by_key[row.sequence_key], row.position) for row in rows]

    def _answer(self, part: StepPart, num_tokens: int) -> int:
        """Return the next token after the sequence's first `num_tokens` tokens."""
        layers = [self._seen(part, layer, num_tokens) for layer in range(self.spec.num_layers)]
        tokens = layers[0][0]
        weighted = tokens * torch.arange(1, num_tokens + 1)
        if num_tokens < part.end:
            state = int(tokens.sum()) if self.cache.states else 0
        else:
            state = sum(int(state[part.block_ids[-1][1]]) for state in self.cache.states.values())
        num_wrong, adapter = 0, self._adapters[part.adapter]
        for keys, values in layers:
            num_wrong += int((keys != tokens[-len(keys) :]).sum())
            num_wrong += int((values != weighted[-len(keys) :] + adapter).sum())
        return (int(weighted.sum()) + num_wrong + state + adapter) % modulus(self.vocab_size)

    def _seen(self, part: StepPart, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer at the positions that the last of `num_tokens` tokens attends to."""
        index = self.cache.group_of(layer)
        group = self.spec.groups[index]
        begin = max(0, num_tokens - group.window) if group.window else 0
        first = begin // group.block_size
        table = part.block_ids[index][first : num_blocks_for(num_tokens, group.block_size)]
        assert EMPTY_PLACE not in table, "a block of the window was given back"
        keys, values = self._pages(layer)[torch.tensor(table)].unbind(1)
        seen = slice(begin - first * group.block_size, num_tokens - first * group.block_size)
        return keys.flatten()[seen], values.flatten()[seen]


def arithmetic_runner(model: ModelConfig, engine: EngineConfig, testing: TestingConfig) -> ArithmeticRunner:
    """Return the runner of a worker with these settings.

    Raises:
        ConfigError: a setting is set that the arithmetic model does not support.
    """
    engine.refuse_unknown(ArithmeticRunner.unknown_settings, "testing.arithmetic")
    model.require_exact("testing.arithmetic is set")
    return ArithmeticRunner(
        engine.num_blocks or NUM_BLOCKS,
        engine.block_size,
        max_model_len=engine.max_model_len or MODEL_LEN,
        max_num_seqs=engine.batch(on_gpu=False).max_num_seqs,
        layer_s=testing.step_ms / 1e3 / NUM_LAYERS,
        token_s=testing.token_ms / 1e3,
        tokenizer=Path(model.path) / "tokenizer.json" if model.path else None,
        max_adapters=engine.max_adapters,
        max_adapter_rank=engine.max_adapter_rank,
        image_placeholder=image_placeholder_of(Path(model.path)) if model.path else None,
    )


def image_placeholder_of(folder: Path) -> int | None:
    """Return the placeholder of images in a model's folder; None: the model takes none."""
    found: int | None = json.loads((folder / "config.json").read_text()).get("image_token_id")
    return found


class ArithmeticReader:
    """Reader of the arithmetic model's images (`ImageReader`)."""

    def __init__(self, placeholder: int) -> None:
        self.placeholder = placeholder

    def read(self, encoded: bytes) -> ReadImage:
        """See `ImageReader.read`. A file whose last bytes are "broken" is."""
        if encoded.endswith(b"broken"):
            raise InvalidRequest("an image cannot be decoded: it is broken")
        number = int.from_bytes(blake2b(encoded, digest_size=2).digest(), "little")
        return ReadImage((max(1, len(encoded) // 8), number), None, 0)

    def token_ids(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """See `ImageReader.token_ids`."""
        num_tokens, number = grid
        return (self.placeholder,) * (num_tokens - 1) + (FIRST_IMAGE_TOKEN + number % NUM_IMAGE_TOKENS,)


@cache
def modulus(vocab_size: int) -> int:
    """Return the largest prime up to `vocab_size`."""
    return next(n for n in range(vocab_size, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))


def logits_of(answers: SequenceOf[int], vocab_size: int) -> torch.Tensor:
    """Return the logits `[answers, vocab_size]` in which each answer is the best token."""
    prime = modulus(vocab_size)
    falling = _falling(prime)
    logits = torch.full((len(answers), vocab_size), float("-inf"))  # tokens from the prime on never occur
    for row, answer in zip(logits, answers, strict=True):
        row[answer:prime] = falling[: prime - answer]
        row[:answer] = falling[prime - answer :]
    return logits


@cache
def _falling(size: int) -> torch.Tensor:
    return -0.1 * torch.arange(size)


def sampled_of(answers: SequenceOf[int], rows: SequenceOf[Row], sampler: Sampler, vocab_size: int) -> Sampled:
    """Return the sampled tokens and scores of rows whose greedy tokens are `answers`.

    If a row's logits are not adjusted, it is sampled and scored among the tokens next to its answer, in their order
    from there: these have all the weight, at a twelfth of the work.
    """
    tokens, scores, prime = list(answers), [NO_SCORES] * len(rows), modulus(vocab_size)
    near = [i for i, row in enumerate(rows) if not _is_by_number(row.sampling) and _is_asked(row.sampling)]
    if near:
        logits = _falling(prime)[:NUM_NEAR].expand(len(near), -1)
        found = sampler.sample_and_score(logits, [rows[i] for i in near])
        for place, i in enumerate(near):
            tokens[i] = (answers[i] + found.token_ids[place]) % prime
            if found.scores:
                scores[i] = _moved(found.scores[place], answers[i], prime)
    far = [i for i, row in enumerate(rows) if _is_by_number(row.sampling)]
    has_scores = any(row.sampling.wants_scores for row in rows)
    if not far:
        return Sampled(tokens, scores if has_scores else None)
    drawn = sampler.sample_and_score(logits_of([answers[i] for i in far], vocab_size), [rows[i] for i in far])
    for place, i in enumerate(far):
        tokens[i] = drawn.token_ids[place]
        scores[i] = drawn.scores[place] if drawn.scores else NO_SCORES
    failures = {far[place]: reason for place, reason in drawn.failures.items()}
    candidates = {far[place]: found for place, found in drawn.candidates.items()}
    return Sampled(tokens, scores if has_scores else None, failures, candidates)


def _is_by_number(params: SamplingParams) -> bool:
    """Return whether parameters refer to token ids, so that the distance from the best token is not enough."""
    is_changed = params.adjusts_logits or params.xtc_probability > 0
    return is_changed or params.use_beam_search or bool(params.logprob_token_ids)


def _is_asked(params: SamplingParams) -> bool:
    """Return whether more than the greedy token is requested."""
    return params.temperature > 0 or params.wants_scores


def _moved(scores: TokenScores, answer: int, prime: int) -> TokenScores:
    """Return scores with token ids, given scores with distances from the answer."""
    return replace(scores, top_ids=tuple((answer + place) % prime for place in scores.top_ids))


def expected_tokens(
    prompt: SequenceOf[int], num_tokens: int, vocab_size: int = 49152, with_state: bool = False, adapter: str = ""
) -> list[int]:
    """Return what `ArithmeticRunner` generates for a prompt, computed without a cache.

    Args:
        adapter: digest of the adapter that answers; empty: none.
    """
    tokens, number = list(prompt), adapter_number(adapter)
    for _ in range(num_tokens):
        state = sum(tokens) if with_state else 0
        tokens.append((sum((p + 1) * t for p, t in enumerate(tokens)) + state + number) % modulus(vocab_size))
    return tokens[len(prompt) :]


def adapter_number(digest: str) -> int:
    """Return the number that the adapter with this digest adds to the sum, which is never 0; empty: 0, no adapter."""
    return 1 + int(digest[:8], 16) if digest else 0
