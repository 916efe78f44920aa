"""The parts of an answer are those of its tokens, in their order, however chunks are grouped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.api import GenerateChunk
from baton.tools import ToolCallDelta
from router.api.answering import PartBegin, PartEnd, PartEvent, PartKind, PartMore, Parts
from tests.support.chunks import CUTS, Said, answers, chunks_of


def read(chunks: list[GenerateChunk]) -> list[PartEvent]:
    parts = Parts()
    return [*(event for chunk in chunks for event in parts.push(chunk)), *parts.end()]


def added_up(events: list[PartEvent]) -> list[tuple[PartBegin, str]]:
    """The parts that events add up to. Each begins behind the end of the one before."""
    found: list[tuple[PartBegin, str]] = []
    is_open = False
    for event in events:
        match event:
            case PartBegin():
                assert not is_open
                assert event.index == len(found)
                found.append((event, ""))
                is_open = True
            case PartMore() | PartEnd():
                assert is_open
                begin, text = found[-1]
                assert (event.index, event.kind) == (begin.index, begin.kind)
                if isinstance(event, PartMore):
                    assert event.text
                    found[-1] = (begin, text + event.text)
                else:
                    is_open = False
    assert not is_open
    return found


@given(said=answers(), data=st.data())
def test_any_grouping_gives_the_same_parts(said: list[Said], data: st.DataObject) -> None:
    found = added_up(read(chunks_of(said, data.draw(CUTS))))
    assert [(begin.kind, text) for begin, text in found] == said
    calls = [(begin.call_id, begin.name) for begin, _ in found if begin.kind is PartKind.CALL]
    assert calls == [(f"call_{i}", f"t{i}") for i in range(len(calls))]


def test_text_of_one_chunk_stands_around_its_calls() -> None:
    calls = tuple(
        ToolCallDelta(index=i, call_id=f"c{i}", name="t", arguments="{}", content_offset=offset)
        for i, offset in enumerate([2, 2, 3])
    )
    first = GenerateChunk(request_id="r", choice_index=0, text="a")
    second = GenerateChunk(request_id="r", choice_index=0, text="bcd", tool_calls=calls)
    kinds = [(begin.kind.value, text) for begin, text in added_up(read([first, second]))]
    assert kinds == [("text", "ab"), ("call", "{}"), ("call", "{}"), ("text", "c"), ("call", "{}"), ("text", "d")]


def test_an_answer_may_have_no_parts() -> None:
    assert read([GenerateChunk(request_id="r", choice_index=0)]) == []
