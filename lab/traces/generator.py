"""Synthetic conversations whose prompts share prefixes as in Mooncake's conversation trace.

    system prompt │ message 1 │ answer 1 │ message 2 │ answer 2 │ message 3
    ──────────────┴───────────┘ turn 1's prompt
    ─────────────────────────────────────┘ turn 2's prompt
    ───────────────────────────────────────────────────────────┘ turn 3's prompt

All prompts start with the same system prompt. The rest of a session is shared only among its own turns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from operator import attrgetter

from baton.errors import ConfigError
from lab.traces.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution by its mean and sigma, the standard deviation of the logarithm.

    With sigma 1 the mean is 1.6 times the median.
    """

    mean: float
    sigma: float

    def sample(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)

    def tokens(self, rng: random.Random) -> int:
        return max(round(self.sample(rng)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Parameters of generated conversations. Raises ConfigError for invalid values."""

    duration_s: float = 2400.0
    """Length of the trace. Later requests are left out, so late sessions lack their last turns. No session starts
    before 0 s."""
    sessions_per_s: float = 2.1
    """Rate of new sessions (Poisson process)."""
    continue_p: float = 0.39
    """Probability that a turn is followed by another."""
    think_s: LogNormal = LogNormal(mean=190.0, sigma=0.95)
    """Time from a turn's arrival to the next one's, which covers the response and the user."""
    system_tokens: int = 512
    first_message_tokens: LogNormal = LogNormal(mean=11_500.0, sigma=1.3)
    """Length of the first message, usually a document."""
    message_tokens: LogNormal = LogNormal(mean=1300.0, sigma=2.2)
    """Length of later messages: usually a sentence, sometimes another document."""
    output_tokens: LogNormal = LogNormal(mean=343.0, sigma=0.7)
    max_prompt_tokens: int = 131_072
    """Maximum prompt length. A longer first prompt is truncated; a session ends before a turn that would exceed it."""
    block_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("duration_s", "sessions_per_s", "block_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}")
        if not 0 <= self.continue_p < 1:
            raise ConfigError(f"continue_p must be at least 0 and less than 1, got {self.continue_p}")
        if not 0 <= self.system_tokens < self.max_prompt_tokens:
            raise ConfigError(
                f"system_tokens must be at least 0 and less than max_prompt_tokens, got {self.system_tokens}"
            )
        for name in ("think_s", "first_message_tokens", "message_tokens", "output_tokens"):
            if not getattr(self, name).mean > 0:
                raise ConfigError(f"{name} must have a mean of more than 0, got {getattr(self, name).mean}")


def generate(conversations: Conversations, seed: int = 0) -> Trace:
    """Generate a trace, the same for the same arguments. Raises ConfigError if no session starts in time.

    The defaults give, as means over 12 seeds (minimum to maximum): 7,850 requests (7,550-8,170), prompts of 12,010
    tokens (11,410-12,370), outputs of 343 (341-348) and a ceiling of 0.359 (0.346-0.377). Mooncake's conversation trace
    has 12,035, 343, and 0.36.
    """
    rng = random.Random(seed)
    fresh_ids = count(conversations.system_tokens // conversations.block_tokens)
    requests: list[TraceRequest] = []
    start_s = rng.expovariate(conversations.sessions_per_s)
    while start_s < conversations.duration_s:
        requests += _session(conversations, start_s, rng, fresh_ids)
        start_s += rng.expovariate(conversations.sessions_per_s)
    if not requests:
        raise ConfigError(f"no session starts within {conversations.duration_s} s; raise duration_s or sessions_per_s")
    requests.sort(key=attrgetter("arrival_s"))
    return Trace(name="conversations", block_tokens=conversations.block_tokens, requests=tuple(requests))


def _session(
    conversations: Conversations, arrival_s: float, rng: random.Random, fresh_ids: Iterator[int]
) -> Iterator[TraceRequest]:
    """Yield the turns that arrive in time. Each turn's new blocks get fresh ids, following those of the turn before."""
    block_ids = list(range(conversations.system_tokens // conversations.block_tokens))
    num_tokens = conversations.system_tokens + conversations.first_message_tokens.tokens(rng)
    num_tokens = min(num_tokens, conversations.max_prompt_tokens)
    while arrival_s < conversations.duration_s and num_tokens <= conversations.max_prompt_tokens:
        block_ids += islice(fresh_ids, num_tokens // conversations.block_tokens - len(block_ids))
        num_output_tokens = conversations.output_tokens.tokens(rng)
        yield TraceRequest(arrival_s, num_tokens, num_output_tokens, tuple(block_ids))
        if rng.random() >= conversations.continue_p:
            return
        num_tokens += num_output_tokens + conversations.message_tokens.tokens(rng)
        arrival_s += conversations.think_s.sample(rng)
