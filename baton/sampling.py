"""What a client asks of sampling, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from baton.errors import InvalidRequest

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 4096
"""Each token of an answer is looked up among them."""


class FinishReason(StrEnum):
    STOP = "stop"
    """End of sequence, a stop id or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context window is used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Constructing it validates it.

    Raises:
        InvalidRequest: a value is outside its range; the message says the range.
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
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def require(ok: bool, param: str, rule: str, value: object) -> None:
            if not ok:
                raise InvalidRequest(f"sampling.{param} must be {rule}; got {value}. Change or unset it.", param)

        if self.max_tokens is not None:
            require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        require(
            math.isfinite(self.temperature) and 0 <= self.temperature <= 2,
            "temperature", "between 0 and 2", self.temperature,
        )  # fmt: skip
        require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or at least 1", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "greater than 0 and at most 1", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        require(1 <= self.n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}", self.n)
        require(self.seed is None or abs(self.seed) < 2**63, "seed", "a signed 64-bit integer", self.seed)
        require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"at most {MAX_STOP_STRINGS} strings",
            f"{len(self.stop)} strings",
        )
        require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids",
            f"{len(self.stop_token_ids)} ids",
        )
        for stop in self.stop:
            require(
                0 < len(stop) <= MAX_STOP_LENGTH, "stop", f"strings of 1 to {MAX_STOP_LENGTH} characters",
                f"one of {len(stop)} characters",
            )  # fmt: skip
