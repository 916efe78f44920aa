"""Answers of the completions endpoints: all chunks in one body, or each as an event."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from baton.api import GenerateChunk, PromptScores, Timing, Usage
from baton.errors import BatonError
from router.api.exchange import event
from router.api.openai.answers import ChoiceAnswer, Shape
from router.api.openai.errors import error_body
from router.api.openai.logprobs import CompletionLogprobs


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """OpenAI's format of an answer. See `router.api.answering.AnswerForm`."""

    shape: Shape
    include_usage: bool
    """Whether a stream ends with the usage."""

    async def whole(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        shape = self.shape
        answers: dict[int, ChoiceAnswer] = {}
        prompts: dict[int, PromptScores] = {}
        usage, timing = Usage(0, 0, 0), Timing()
        async with contextlib.aclosing(chunks):
            chunk: GenerateChunk | None = first
            while chunk is not None:
                chunk = shape.shown(chunk)
                answer = answers.setdefault(chunk.choice_index, ChoiceAnswer())
                answer.text += chunk.text
                answer.reasoning += chunk.reasoning
                answer.tool_calls += chunk.tool_calls
                answer.token_ids += chunk.token_ids
                answer.scores.append(chunk.scores)
                if chunk.finish_reason:
                    answer.finish_reason, answer.stop_reason = chunk.finish_reason, chunk.stop_reason
                usage, timing = chunk.usage or usage, chunk.timing or timing
                if chunk.prompt_scores is not None:
                    prompts[shape.prompt_of(chunk.choice_index)] = chunk.prompt_scores
                chunk = await anext(chunks, None)
        return shape.whole(dict(sorted(answers.items())), usage, timing, prompts)

    async def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        shape = self.shape
        begun: dict[int, CompletionLogprobs] = {}
        prompts: dict[int, PromptScores] = {}
        usage, timing = None, Timing()
        async with contextlib.aclosing(chunks):
            try:
                chunk: GenerateChunk | None = first
                while chunk is not None:
                    chunk = shape.shown(chunk)
                    if chunk.prompt_scores is not None:
                        prompts[shape.prompt_of(chunk.choice_index)] = chunk.prompt_scores
                    index, is_first = chunk.choice_index, chunk.choice_index not in begun
                    is_new = bool(
                        chunk.text or chunk.reasoning or chunk.tool_calls or chunk.finish_reason or chunk.scores
                    )
                    is_new = is_new or (bool(shape.prompt_ids) and bool(chunk.token_ids))
                    if is_new or is_first:
                        logprobs = begun.get(index) or begun.setdefault(index, CompletionLogprobs(shape.tokenizer))
                        scores = prompts.get(shape.prompt_of(index))
                        yield event(shape.chunk(index, chunk, is_first, logprobs, scores))
                    usage, timing = chunk.usage or usage, chunk.timing or timing
                    chunk = await anext(chunks, None)
            except BatonError as error:
                yield self.broken(error)
                return
        if self.include_usage and usage is not None:
            yield event(shape.usage_chunk(usage, timing))
        yield b"data: [DONE]\n\n"

    def broken(self, error: BatonError) -> bytes:
        return event(error_body(error))
