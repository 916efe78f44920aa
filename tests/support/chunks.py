"""Answers as the router's service gives them: in chunks, wherever these are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from baton.api import GenerateChunk, Usage
from baton.sampling import FinishReason
from baton.tools import ToolCallDelta, joined_calls
from router.api.answering import PartKind

Said = tuple[PartKind, str]
"""A part of an answer: what it is, and its text, or a call's arguments. Calls are of the tools t0, t1 and so on."""
USAGE = Usage(prompt_tokens=9, completion_tokens=7, cached_tokens=4, reasoning_tokens=2)

_letters = st.text(st.sampled_from("ab é🐈\n"), min_size=1, max_size=6)
_arguments = st.sampled_from(["{}", '{"a": 1}', '{"city": "é🐈", "n": [1, 2]}', '{"cut off'])


@st.composite
def answers(draw: st.DrawFn) -> list[Said]:
    """Answers of any parts, no two texts in a row."""
    said: list[Said] = [(PartKind.REASONING, draw(_letters))] if draw(st.booleans()) else []
    for kind in draw(st.lists(st.sampled_from([PartKind.TEXT, PartKind.CALL]), max_size=5)):
        if kind is PartKind.CALL:
            said.append((kind, draw(_arguments)))
        elif not said or said[-1][0] is not PartKind.TEXT:
            said.append((kind, draw(_letters)))
    return said


CUTS = st.lists(st.integers(0, 100), max_size=12)


def chunks_of(
    said: Sequence[Said],
    cuts: Sequence[int],
    finish: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
) -> list[GenerateChunk]:
    """The chunks of an answer that is cut at these letters. The last one has the usage."""
    letters = list[GenerateChunk]()
    num_calls = num_characters = 0
    for kind, text in said:
        for place, letter in enumerate(text):
            chunk = GenerateChunk(request_id="r", choice_index=0, token_ids=(1,))
            if kind is PartKind.CALL:
                first = {"call_id": f"call_{num_calls}", "name": f"t{num_calls}", "content_offset": num_characters}
                call = ToolCallDelta(index=num_calls, arguments=letter, **({} if place else first))  # type: ignore[arg-type]
                letters.append(replace(chunk, tool_calls=(call,)))
            elif kind is PartKind.TEXT:
                num_characters += 1
                letters.append(replace(chunk, text=letter))
            else:
                letters.append(replace(chunk, reasoning=letter))
        num_calls += kind is PartKind.CALL
    edges = [0, *sorted(cut % (len(letters) + 1) for cut in cuts), len(letters)]
    joined = [_joined(letters[begin:end]) for begin, end in pairwise(edges)]
    return [*joined[:-1], replace(joined[-1], finish_reason=finish, stop_reason=stop_reason, usage=USAGE)]


def _joined(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    return GenerateChunk(
        request_id="r",
        choice_index=0,
        text="".join(chunk.text for chunk in chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        tool_calls=joined_calls(call for chunk in chunks for call in chunk.tool_calls),
    )
