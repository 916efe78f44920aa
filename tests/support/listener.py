"""A client that hears one answer in several streams: each breaks, and the next one goes on where it broke."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton import wire
from baton.api import GenerateRequest, Timing
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from baton.tools import ToolCallDelta, joined_calls
from deploy.operator.client import metadata_of
from tests.integration.cluster import Served

REQUEST_IDS = (f"listener-{number}" for number in itertools.count())


@dataclass
class Heard:
    """What a client has of one choice."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scores: TokenScores = NO_SCORES


class Listener:
    """One request, heard in as many streams as it takes. Like any client, it knows no more than what came."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request if request.request_id else replace(request, request_id=next(REQUEST_IDS))
        self.choices = [Heard() for _ in range(request.sampling.get("n", 1))]
        self.num_streams = 0
        self.num_completion_tokens: int | None = None
        self.num_reasoning_tokens: int | None = None
        self.timing: Timing | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(heard.token_ids) for heard in self.choices)

    def listen(
        self, router: Served, until: Callable[[], bool] = lambda: False, timeout_s: float = 60, api_key: str = ""
    ) -> Listener:
        """Until the end, or until it hangs up. Continues what it has."""
        request = self.request
        if self.num_streams:
            num_tokens = {index: len(heard.token_ids) for index, heard in enumerate(self.choices)}
            request = replace(request, resume_from=num_tokens)
        self.num_streams += 1
        message, metadata = wire.generate_request(request), metadata_of(api_key)
        call = router.inference.Generate(message, timeout=timeout_s, metadata=metadata)
        for chunk in map(wire.generate_chunk, call):
            heard = self.choices[chunk.choice_index]
            assert chunk.request_id == self.request.request_id
            assert chunk.token_ids or chunk.finish_reason, "an empty message"
            assert not heard.finish_reason or not (chunk.token_ids or chunk.text or chunk.reasoning), (
                "it goes on after its end"
            )
            heard.token_ids += chunk.token_ids
            heard.text += chunk.text
            heard.reasoning += chunk.reasoning
            heard.tool_calls = joined_calls((*heard.tool_calls, *chunk.tool_calls))
            heard.scores = TokenScores.joined((heard.scores, chunk.scores))
            heard.finish_reason, heard.stop_reason = chunk.finish_reason, chunk.stop_reason
            if chunk.usage:
                self.num_completion_tokens, self.timing = chunk.usage.completion_tokens, chunk.timing
                self.num_reasoning_tokens = chunk.usage.reasoning_tokens
            if until():
                call.cancel()
                break
        return self

    def same_as(self, other: Listener) -> None:
        assert self.choices == other.choices
        assert self.num_completion_tokens == other.num_completion_tokens == self.num_tokens
