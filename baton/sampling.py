"""Sampling parameters of a request, validated."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from baton.errors import InvalidRequest
from baton.structure import StructuredOutputs

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 4096
"""Limit, because each generated token is looked up among them."""
MAX_LISTED_TOKENS = 1024
"""Maximum number of tokens with a bias, and of tokens to which an output may be limited."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_TOKENS = 4096
"""Maximum number of tokens of all bad words: the parameters of a request are sent with each of its attempts."""
MAX_DRY_BREAKERS = 64
MIN_REPETITION_PENALTY = 0.01
MAX_PENALTY = 2.0
"""OpenAI's bound for presence and frequency penalty, on either side of 0."""
MAX_BIAS = 100.0
"""OpenAI's bound for a bias, on either side of 0."""
MAX_LOGPROBS = 20
MAX_DRY = 100.0
MAX_DRY_BASE = 4.0
MAX_DRY_LENGTH = 50
"""Maximum number of tokens of a repetition that are counted; longer ones count as this long."""
MAX_REASONING_END = 16
"""Maximum number of tokens that end reasoning."""
MAX_LENGTH_PENALTY = 10.0
MAX_INT32 = 2**31 - 1
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Texts that end a repetition, as proposed by DRY's author."""


class FinishReason(StrEnum):
    STOP = "stop"
    """End of sequence, a stop id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context window is used up."""
    TOOL_CALLS = "tool_calls"
    """The choice has called tools and has stopped. Only routers set this."""
    CONTENT_FILTER = "content_filter"
    """The operator's moderation has ended it. Only routers set this."""


class EarlyStopping(StrEnum):
    """Time at which a beam search ends that has as many finished sequences as beams (transformers' rules)."""

    TRUE = "true"
    """At once."""
    FALSE = "false"
    """When the best beam, at its current length, is worse than the worst finished sequence."""
    NEVER = "never"
    """When no beam, whatever its length, can be better than the worst finished sequence."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Constructing it validates them.

    Raises:
        InvalidRequest: a value is outside its range; the message names the range.
    """

    max_tokens: int | None = None
    """None: until the context window is full."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 and -1: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    best_of: int | None = None
    """Number of choices generated, of which the `n` with the best mean log probability are returned; None: `n`."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of likeliest tokens returned with each token's log probability; None: no log probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log probabilities are returned instead of the likeliest ones'."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens returned with the log probability of each prompt token but the first; None: none."""
    min_tokens: int = 0
    """Minimum number of generated tokens. End of sequence, stop ids and stop strings are ignored before that."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of all tokens in prompt and output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence of the token in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with the bias added to their logits, by rising id."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output must not contain; the router converts them to `bad_word_ids`."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last one is never drawn after the others."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that are drawn; empty: all."""
    typical_p: float = 1.0
    """Keep the tokens whose surprisal is closest to the distribution's entropy, up to this probability; 1: all."""
    dry_multiplier: float = 0.0
    """Penalty of a token that would repeat `dry_allowed_length` tokens and itself; 0: none."""
    dry_base: float = 1.75
    """Factor by which the penalty grows with each further repeated token."""
    dry_allowed_length: int = 2
    dry_range: int = 0
    """Number of last tokens of prompt and output in which repetitions are searched; 0: all."""
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    """Sequence breakers: DRY does not match repetitions across these texts.

    The router converts them to `dry_breaker_ids`.
    """
    dry_breaker_ids: tuple[int, ...] = ()
    xtc_probability: float = 0.0
    """Probability with which the likeliest tokens are excluded; 0: never.

    The least likely of those above `xtc_threshold` is kept.
    """
    xtc_threshold: float = 0.1
    include_stop_str_in_output: bool = False
    """True if the text that ends the choice, a stop string's or a stop token's, is part of the output."""
    skip_special_tokens: bool = True
    """True if special tokens have no text."""
    xtc_exempt_token_ids: tuple[int, ...] = ()
    """Tokens, in addition to end tokens, that XTC never excludes: if it would, it excludes none."""
    structured_outputs: StructuredOutputs | None = None
    """Structure of the output after its reasoning; None: any text."""
    reasoning_end_ids: tuple[int, ...] = ()
    """Tokens that end the reasoning at the start of the output; empty: there is no reasoning."""
    reasoning_begin_id: int | None = None
    """Token that starts the reasoning if it comes first; None: the output starts inside of the reasoning."""
    thinking_budget: int | None = None
    """Number of reasoning tokens after which the end tokens are forced; None: unlimited."""
    use_beam_search: bool = False
    """True for a beam search, which returns the `n` best sequences; no token is drawn at random then."""
    beam_width: int | None = None
    """Number of beams; None: `n`."""
    length_penalty: float = 1.0
    """Exponent of the length by which a sequence's log probability is divided to give its score."""
    early_stopping: str = EarlyStopping.FALSE
    """One of `EarlyStopping`."""

    @property
    def needs_history(self) -> bool:
        """True if a draw depends on earlier tokens."""
        repeats = self.penalizes or self.dry_multiplier != 0
        return repeats or self.is_structured or any(len(word) > 1 for word in self.bad_word_ids)

    @property
    def penalizes(self) -> bool:
        """True if any penalty but DRY lowers tokens that the text already contains."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts_logits(self) -> bool:
        """True if logits are changed before a token is chosen."""
        lists = self.logit_bias or self.bad_word_ids or self.allowed_token_ids
        return bool(lists) or self.min_tokens > 0 or self.dry_multiplier != 0 or self.penalizes or self.is_structured

    @functools.cached_property
    def is_plain(self) -> bool:
        """True if tokens are drawn one by one from unchanged logits and returned without scores."""
        return not (self.adjusts_logits or self.wants_scores or self.use_beam_search)

    @property
    def is_structured(self) -> bool:
        """True if the tokens so far determine the allowed next tokens."""
        return self.structured_outputs is not None or self.thinking_budget is not None

    @property
    def num_answers(self) -> int:
        """Number of choices that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_beams(self) -> int:
        """Number of sequences that an engine computes in parallel for a choice: the beams of a search, or one."""
        return (self.beam_width or self.n) if self.use_beam_search else 1

    @property
    def comes_at_once(self) -> bool:
        """True if the choices are known only when all of them are complete."""
        return self.use_beam_search or self.is_selected

    @property
    def is_selected(self) -> bool:
        """True if the client gets only some of the generated choices."""
        return self.num_answers > self.n

    @property
    def wants_scores(self) -> bool:
        """True if log probabilities are returned with the tokens."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def named_token_ids(self) -> dict[str, tuple[int, ...]]:
        """Return all token ids that the parameters name, by field."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.logit_bias),
            "bad_word_ids": tuple(token_id for word in self.bad_word_ids for token_id in word),
            "allowed_token_ids": self.allowed_token_ids,
            "dry_breaker_ids": self.dry_breaker_ids,
            "xtc_exempt_token_ids": self.xtc_exempt_token_ids,
            "reasoning_end_ids": self.reasoning_end_ids,
            "reasoning_begin_id": () if self.reasoning_begin_id is None else (self.reasoning_begin_id,),
        }

    @functools.cached_property
    def asked(self) -> Mapping[str, Any]:
        """Non-default values, by name: two or three for most requests."""
        values = _of_all(self)
        differ = map(operator.ne, values, _DEFAULTS.values())
        return dict(itertools.compress(zip(_DEFAULTS, values, strict=True), differ))

    def seeded(self, seed: int) -> SamplingParams:
        """Return a copy with this seed, which the caller guarantees to be in range.

        Nothing is validated again, which saves time for each request without a seed.
        """
        copy = object.__new__(SamplingParams)
        vars(copy).update(vars(self), seed=seed, asked={**self.asked, "seed": seed})
        return copy

    def __post_init__(self) -> None:
        self._check_draw()
        self._check_ends()
        if _of_adjustments(self) != _NO_ADJUSTMENTS:
            self._check_adjustments()
        self._check_structure()
        self._check_beams()

    def _check_draw(self) -> None:
        t, p, least, typical = self.temperature, self.top_p, self.min_p, self.typical_p
        _require(math.isfinite(t) and 0 <= t <= 2, "temperature", "between 0 and 2", t)
        _require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or at least 1", self.top_k)
        _require(0 < p <= 1, "top_p", "greater than 0 and at most 1", p)
        _require(0 <= least <= 1, "min_p", "between 0 and 1", least)
        _require(0 < typical <= 1, "typical_p", "greater than 0 and at most 1", typical)
        _require(0 <= self.xtc_probability <= 1, "xtc_probability", "between 0 and 1", self.xtc_probability)
        _require(0 <= self.xtc_threshold <= 1, "xtc_threshold", "between 0 and 1", self.xtc_threshold)
        _require(1 <= self.n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}", self.n)
        most = self.best_of
        _require(
            most is None or self.n <= most <= MAX_CHOICES, "best_of", f"between n, {self.n}, and {MAX_CHOICES}", most
        )
        _require(self.seed is None or abs(self.seed) < 2**63, "seed", "a signed 64-bit integer", self.seed)

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        if self.logprobs is not None:
            _require(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"between 0 and {MAX_LOGPROBS}", self.logprobs)
        if (most := self.prompt_logprobs) is not None:
            _require(0 <= most <= MAX_LOGPROBS, "prompt_logprobs", f"between 0 and {MAX_LOGPROBS}", most)
        _require_few(self.logprob_token_ids, "logprob_token_ids", MAX_LOGPROBS, "ids")
        _require(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _require(
                self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens, {self.max_tokens}",
                self.min_tokens,
            )  # fmt: skip
        _require_few(self.stop, "stop", MAX_STOP_STRINGS, "strings")
        _require_few(self.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS, "ids")
        for stop in self.stop:
            _require_length(stop, "stop")

    def _check_adjustments(self) -> None:
        """Check what changes logits."""
        penalty = self.repetition_penalty
        _require(MIN_REPETITION_PENALTY <= penalty <= MAX_PENALTY, "repetition_penalty",
                 f"between {MIN_REPETITION_PENALTY} and {MAX_PENALTY:g}", penalty)  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-MAX_PENALTY <= value <= MAX_PENALTY, name, f"between {-MAX_PENALTY:g} and {MAX_PENALTY:g}", value)
        dry = self.dry_multiplier
        _require(0 <= dry <= MAX_DRY, "dry_multiplier", f"between 0 and {MAX_DRY:g}", dry)
        _require(1 <= self.dry_base <= MAX_DRY_BASE, "dry_base", f"between 1 and {MAX_DRY_BASE:g}", self.dry_base)
        length = self.dry_allowed_length
        _require(1 <= length <= MAX_DRY_LENGTH, "dry_allowed_length", f"between 1 and {MAX_DRY_LENGTH}", length)
        _require(
            0 <= self.dry_range <= MAX_INT32, "dry_range", f"between 0 (all tokens) and {MAX_INT32}", self.dry_range
        )
        if self.dry_sequence_breakers is not DRY_BREAKERS:
            _require_few(self.dry_sequence_breakers, "dry_sequence_breakers", MAX_DRY_BREAKERS, "strings")
            for breaker in self.dry_sequence_breakers:
                _require_length(breaker, "dry_sequence_breakers")
        # A client's own, and one for each text.
        _require_few(self.dry_breaker_ids, "dry_breaker_ids", 2 * MAX_DRY_BREAKERS, "ids")
        _require_few(self.xtc_exempt_token_ids, "xtc_exempt_token_ids", MAX_LISTED_TOKENS, "ids")
        _require_few(self.allowed_token_ids, "allowed_token_ids", MAX_LISTED_TOKENS, "ids")
        _require_few(self.logit_bias, "logit_bias", MAX_LISTED_TOKENS, "ids")
        for token_id, bias in self.logit_bias:
            _require(-MAX_BIAS <= bias <= MAX_BIAS, "logit_bias", f"numbers between {-MAX_BIAS:g} and {MAX_BIAS:g}",
                     f"{bias} for token {token_id}")  # fmt: skip
        _require_few(self.bad_words, "bad_words", MAX_BAD_WORDS, "strings")
        for word in self.bad_words:
            _require_length(word, "bad_words")
        # A word is banned as it stands at the begin of a text and after a space.
        _require_few(self.bad_word_ids, "bad_word_ids", 2 * MAX_BAD_WORDS, "sequences")
        for word_ids in self.bad_word_ids:
            _require(1 <= len(word_ids) <= MAX_BAD_WORD_TOKENS, "bad_word_ids",
                     f"sequences of 1 to {MAX_BAD_WORD_TOKENS} ids", f"one of {len(word_ids)} ids")  # fmt: skip
        num_tokens = sum(map(len, self.bad_word_ids))
        _require(num_tokens <= MAX_BAD_TOKENS, "bad_word_ids", f"at most {MAX_BAD_TOKENS} ids together", num_tokens)
        if self.allowed_token_ids and self.bad_word_ids:
            banned = {word_ids[0] for word_ids in self.bad_word_ids if len(word_ids) == 1}
            _require(not banned.issuperset(self.allowed_token_ids), "allowed_token_ids",
                     "ids of which not all are bad words", "ids that all are")  # fmt: skip

    def _check_structure(self) -> None:
        _require_few(self.reasoning_end_ids, "reasoning_end_ids", MAX_REASONING_END, "ids")
        if (budget := self.thinking_budget) is not None:
            _require(0 <= budget <= MAX_INT32, "thinking_budget", f"between 0 and {MAX_INT32}", budget)
        if (begin_id := self.reasoning_begin_id) is not None:
            _require(
                bool(self.reasoning_end_ids), "reasoning_begin_id", "set together with reasoning_end_ids", begin_id
            )
        if self.structured_outputs is not None:
            _require(not self.ignore_eos, "ignore_eos", "false with structured_outputs, which say where it ends", True)

    def _check_beams(self) -> None:
        width, penalty, early, most = self.beam_width, self.length_penalty, self.early_stopping, MAX_LENGTH_PENALTY
        if not self.use_beam_search:
            together = "set together with use_beam_search"
            _require(width is None, "beam_width", together, width)
            _require(penalty == 1, "length_penalty", together, penalty)
            _require(early == EarlyStopping.FALSE, "early_stopping", together, early)
            return
        rule = f"between n, {self.n}, and {MAX_CHOICES}"
        _require(width is None or self.n <= width <= MAX_CHOICES, "beam_width", rule, width)
        _require(-most <= penalty <= most, "length_penalty", f"between {-most:g} and {most:g}", penalty)
        _require(early in tuple(EarlyStopping), "early_stopping", "true, false or never", early)
        _require(self.temperature in (0, 1), "temperature", "0 or 1 with use_beam_search", self.temperature)
        for name, neutral in UNDRAWN.items():
            value = getattr(self, name)
            _require(value in neutral, name, "unset with use_beam_search, which draws nothing", value)
        _require(not self.stop, "stop", "unset with use_beam_search: name stop_token_ids", list(self.stop))
        _require(self.best_of is None, "best_of", "unset with use_beam_search: set beam_width", self.best_of)


_ADJUSTMENTS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "bad_word_ids",
    "allowed_token_ids", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers",
    "dry_breaker_ids", "xtc_exempt_token_ids",
)  # fmt: skip
"""Fields that most requests leave as they are, and that are checked together."""
_of_adjustments = operator.attrgetter(*_ADJUSTMENTS)
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_of_all = operator.attrgetter(*_DEFAULTS)
_NO_ADJUSTMENTS = tuple(_DEFAULTS[name] for name in _ADJUSTMENTS)
UNDRAWN: dict[str, tuple[float, ...]] = {
    "top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,), "typical_p": (1.0,), "xtc_probability": (0.0,),
}  # fmt: skip
"""Parameters of a draw -> the values that change nothing: the only ones beside a beam search."""


def _require(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"sampling.{param} must be {rule}; got {value}. Change or unset it.", param)


def _require_few(values: Sequence[object], param: str, most: int, what: str) -> None:
    _require(len(values) <= most, param, f"at most {most} {what}", f"{len(values)} {what}")


def _require_length(text: str, param: str) -> None:
    rule, got = f"strings of 1 to {MAX_STOP_LENGTH} characters", f"one of {len(text)} characters"
    _require(0 < len(text) <= MAX_STOP_LENGTH, param, rule, got)
