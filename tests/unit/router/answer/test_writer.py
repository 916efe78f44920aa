"""What a client has been given with k tokens is a function of these tokens: so a broken stream can be continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from baton.sampling import FinishReason, SamplingParams
from baton.scores import TokenScores
from baton.tools import Tool, ToolCallDelta, joined_calls
from router.answer import AnswerWriter, CallIds, Calls, Channels, Mark, Piece, Reasoning, ReasoningReader, call_format
from router.prompt import Tokenizer
from tests.unit.router.answer import transcripts

CAT = "🐈".encode()
MERGES = [(CAT[0], CAT[1]), (0x0A, 0x0A), (0x61, 0x62)]
"""Half a cat, two line ends and `ab` are tokens of their own; whatever else is one token a byte."""
END = 259
"""The special token <end>."""
STOPS = ["\n\n", "ab🐈", "🐈🐈", "b\n", "é", "a"]

PARAMS = st.builds(
    SamplingParams,
    stop=st.lists(st.sampled_from(STOPS), max_size=3).map(tuple),
    stop_token_ids=st.sampled_from([(), (0x0A, 0x61), tuple(range(256, 260))]),
    min_tokens=st.integers(0, 6),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
)
REASONINGS = st.sampled_from([("ab", "é"), ("a", "🐈"), ("b|👍", "a+"), ("<end>", "b")])
PLANS = st.none() | st.tuples(REASONINGS, st.booleans())
"""Marks that are regular expressions, and whether the answer begins between them; None: it has no channels."""
texts = st.text(st.sampled_from("ab \né🐈👍🏽"), max_size=24)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    letters = _letters()
    merges = [(letters[left], letters[right]) for left, right in MERGES]
    tokens = [*letters, *(left + right for left, right in merges)]
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    assert inner.token_to_id("<end>") == END
    folder = tmp_path_factory.mktemp("bytes")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return Tokenizer.load(folder)


def _letters() -> list[str]:
    """GPT-2's printable stand-ins for the bytes, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def grouped(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    return [token_ids[a:b] for a, b in pairwise(edges)]


def stopping(stops: Sequence[str]) -> SamplingParams:
    return SamplingParams(stop=tuple(stops))


def written(writer: AnswerWriter, groups: list[list[int]], finish: FinishReason | None) -> Piece:
    """All pieces joined, up to the one that ends the answer; the last group has the engine's word on the end, and, as
    the engine's, the last token.
    """
    while len(groups) > 1 and not groups[-1]:
        groups = groups[:-1]
    text, reasoning, token_ids, calls = "", "", tuple[int, ...](), tuple[ToolCallDelta, ...]()
    for number, group in enumerate(groups):
        piece = writer.push(group, finish if number == len(groups) - 1 else None)
        text, reasoning = text + piece.text, reasoning + piece.reasoning
        token_ids, calls = token_ids + piece.token_ids, joined_calls((*calls, *piece.tool_calls))
        if piece.finish_reason is not None:
            break
    return piece._replace(text=text, reasoning=reasoning, token_ids=token_ids, tool_calls=calls)


def channels_of(plan: tuple[tuple[str, str], bool] | None) -> Channels | None:
    if plan is None:
        return None
    (opens, closes), is_open = plan
    reader = ReasoningReader(Reasoning(mark(opens), mark(closes)), is_open=is_open)
    return Channels(reader, shown_ids=frozenset({END}))


def mark(pattern: str) -> Mark:
    return Mark.of({"open_pattern": pattern}, "open")


@settings(max_examples=250)
@given(data=st.data())
def test_a_stream_goes_on_byte_for_byte_wherever_it_broke(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = tokenizer.encode(data.draw(texts))
    junk = st.integers(0, tokenizer.vocab_size - 1)
    token_ids = token_ids[: data.draw(st.integers(0, len(token_ids)))] + data.draw(st.lists(junk, max_size=4))
    token_ids = token_ids or [0]
    params = data.draw(PARAMS)
    end = data.draw(st.sampled_from(FinishReason))
    cuts = st.lists(st.integers(0, 30), max_size=8)

    plan = data.draw(PLANS)

    def writer_of(num_delivered: int = 0) -> AnswerWriter:
        return AnswerWriter(tokenizer, (), params, num_delivered=num_delivered, channels=channels_of(plan))

    whole = written(writer_of(), [[i] for i in token_ids], end)
    num_delivered = data.draw(st.integers(0, len(whole.token_ids)))
    is_ended = num_delivered == len(whole.token_ids)
    before = written(
        writer_of(),
        grouped(token_ids[:num_delivered], data.draw(cuts)),
        end if num_delivered == len(token_ids) else None,
    )
    assert (before.finish_reason is not None) == is_ended

    writer = writer_of(num_delivered)
    after = written(writer, grouped(token_ids, data.draw(cuts)), end)
    assert before.token_ids + after.token_ids == whole.token_ids
    assert before.text + after.text == whole.text
    assert before.reasoning + after.reasoning == whole.reasoning
    assert after.num_reasoning_tokens == whole.num_reasoning_tokens
    assert (after.finish_reason, after.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert writer.num_awaited == 0


def joined_text(form: str) -> st.SearchStrategy[str]:
    """Answers with calls, words between them and in them."""
    one, other = {
        "hermes": (transcripts.hermes(*transcripts.ONE), transcripts.hermes(("add", '{"é🐈": 1}'))),
        "qwen xml": (
            transcripts.tagged("weather", ("city", "é🐈")),
            "<tool_call>\n<function=add>a<parameter=x>\n1\n</parameter><parameter=y>2</parameter>b\n</function></tool_call>",
        ),
    }[form]
    return st.lists(st.sampled_from([one, other, one[:-8], "a", " ", "🐈\n"]), min_size=1, max_size=6).map("".join)


@pytest.mark.parametrize(("name", "form"), [("hermes", call_format.HERMES), ("qwen xml", call_format.QWEN_XML)])
@settings(max_examples=60)
@given(data=st.data())
def test_calls_go_on_wherever_a_stream_broke(
    tokenizer: Tokenizer, name: str, form: call_format.CallForm, data: st.DataObject
) -> None:
    token_ids = tokenizer.encode(data.draw(joined_text(name)))
    tools = {each: Tool(name=each) for each in ("weather", "add")}
    cuts = st.lists(st.integers(0, 400), max_size=12)

    def writer_of(num_delivered: int = 0) -> AnswerWriter:
        channels = Channels(None, Calls(form, tools, CallIds("r", 0, 29)))
        return AnswerWriter(tokenizer, (), SamplingParams(), num_delivered=num_delivered, channels=channels)

    end = data.draw(st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]))
    whole = written(writer_of(), [[i] for i in token_ids], end)
    is_called = bool(whole.tool_calls) and end is FinishReason.STOP
    assert whole.finish_reason == (FinishReason.TOOL_CALLS if is_called else end)
    num_delivered = data.draw(st.integers(0, len(token_ids) - 1))
    before = written(writer_of(), grouped(token_ids[:num_delivered], data.draw(cuts)), None)
    after = written(writer_of(num_delivered), grouped(token_ids, data.draw(cuts)), end)
    assert after.finish_reason == whole.finish_reason
    assert before.text + after.text == whole.text
    assert joined_calls((*before.tool_calls, *after.tool_calls)) == whole.tool_calls
    for call in after.tool_calls:
        assert not call.name or len(before.text) <= call.content_offset <= len(whole.text)


def test_a_chunk_has_each_call_once(tokenizer: Tokenizer) -> None:
    raw = transcripts.tagged("add", ("x", "1"), ("y", "2"))
    channels = Channels(None, Calls(call_format.QWEN_XML, {"add": Tool(name="add")}, CallIds("r", 0, 29)))
    writer = AnswerWriter(tokenizer, (), SamplingParams(), channels=channels)
    (call,) = writer.push(tokenizer.encode(f"🐈{raw}"), FinishReason.LENGTH).tool_calls
    assert (call.name, call.arguments, call.content_offset) == ("add", '{"x": "1", "y": "2"}', 1)


def test_an_unfinished_character_at_the_end_is_not_given_out_twice(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a🐈")[:2]
    whole = AnswerWriter(tokenizer, (), SamplingParams()).push(token_ids, FinishReason.LENGTH)
    assert whole.text == "a\ufffd"
    again = AnswerWriter(tokenizer, (), SamplingParams(), num_delivered=2).push(token_ids, FinishReason.LENGTH)
    assert again == Piece(text="", token_ids=(), finish_reason=FinishReason.LENGTH)


def test_what_may_have_been_a_mark_comes_at_the_end(tokenizer: Tokenizer) -> None:
    def ended(text: str, *, is_open: bool) -> Piece:
        channels = channels_of((("aab", "bba"), is_open))
        return AnswerWriter(tokenizer, (), SamplingParams(), channels=channels).push(
            tokenizer.encode(text), FinishReason.LENGTH
        )

    assert ended("aa", is_open=False).text == "aa"
    assert ended("abb", is_open=True).reasoning == "abb"


@pytest.mark.parametrize(("stops", "num_missing"), [((), 2), (("b",), 4)])
def test_an_answer_that_ends_before_what_the_client_has_is_noticed(
    tokenizer: Tokenizer, stops: tuple[str, ...], num_missing: int
) -> None:
    writer = AnswerWriter(tokenizer, (), stopping(stops), num_delivered=5)
    piece = writer.push(tokenizer.encode("ba\n"), FinishReason.LENGTH)
    assert piece.finish_reason is not None
    assert piece.token_ids == ()
    assert writer.num_awaited == num_missing


def test_a_stop_string_ends_nothing_before_min_tokens(tokenizer: Tokenizer) -> None:
    """It counts when it is complete, with the token that completes it."""
    token_ids = tokenizer.encode("xaxa\nxab")  # the last two letters are one token
    assert len(token_ids) == 7

    def answer(min_tokens: int, *stops: str) -> Piece:
        params = SamplingParams(stop=stops, min_tokens=min_tokens)
        return written(AnswerWriter(tokenizer, (), params), [[i] for i in token_ids], FinishReason.LENGTH)

    assert answer(0, "a") == Piece(
        text="x", token_ids=tuple(token_ids[:2]), finish_reason=FinishReason.STOP, stop_reason="a"
    )
    assert answer(1, "a").text == "x"
    assert (
        answer(2, "a")
        == answer(3, "a")
        == Piece(text="xax", token_ids=tuple(token_ids[:4]), finish_reason=FinishReason.STOP, stop_reason="a")
    )
    assert answer(4, "a") == Piece(
        text="xaxa\nx", token_ids=tuple(token_ids), finish_reason=FinishReason.STOP, stop_reason="a"
    )
    assert answer(7, "a") == Piece(text="xaxa\nxab", token_ids=tuple(token_ids), finish_reason=FinishReason.LENGTH)
    assert answer(4, "a\n").text == "xax", "begun before, complete after"
    assert answer(5, "a\n").text == "xaxa\nxab"
    assert answer(5, "a\n", "xa").text == "xaxa\n", "what was too early hides no later one"


def test_what_ends_an_answer_is_text_if_the_client_says_so(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("xaaé")

    def answer(end: FinishReason, **asked: Any) -> Piece:
        return AnswerWriter(tokenizer, (), SamplingParams(**asked)).push(token_ids, end)

    assert answer(FinishReason.LENGTH, stop=("aa",)).text == "x"
    assert answer(FinishReason.LENGTH, stop=("aa",), include_stop_str_in_output=True).text == "xaa"
    last = token_ids[-1]
    stopped = answer(FinishReason.STOP, stop_token_ids=(last,))
    assert stopped == Piece(
        text="xaa\ufffd", token_ids=tuple(token_ids), finish_reason=FinishReason.STOP, stop_reason=last
    )
    assert answer(FinishReason.STOP, stop_token_ids=(last,), include_stop_str_in_output=True).text == "xaaé"
    assert answer(FinishReason.STOP).stop_reason is None, "end of sequence"
    assert answer(FinishReason.LENGTH, stop_token_ids=(last,)).stop_reason is None


def test_special_tokens_have_text_if_the_client_wants_it(tokenizer: Tokenizer) -> None:
    (special,) = tokenizer.special_ids
    token_ids = [*tokenizer.encode("a"), special, *tokenizer.encode("b")]
    for skip, text in ((True, "ab"), (False, "a<end>b")):
        params = SamplingParams(skip_special_tokens=skip)
        assert AnswerWriter(tokenizer, (), params).push(token_ids, FinishReason.LENGTH).text == text


def test_scores_are_those_of_the_tokens_that_come_out(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("xaxa")
    scores = TokenScores((-1.0, -2.0, -3.0, -4.0), (1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4))
    writer = AnswerWriter(tokenizer, (), SamplingParams(stop=("ax",)), num_delivered=1)
    piece = writer.push(token_ids, None, scores)
    assert piece == Piece(
        text="",
        token_ids=tuple(token_ids[1:3]),
        finish_reason=FinishReason.STOP,
        stop_reason="ax",
        scores=scores.part(1, 3),
    )
    writer = AnswerWriter(tokenizer, (), SamplingParams(), num_delivered=3)
    assert writer.push(token_ids, None, scores).scores == scores.part(3, 4)


def test_what_an_end_flushes_is_no_stop_string_too_early(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a🐈")[:2]
    for min_tokens, text in ((1, "a"), (2, "a\ufffd")):
        params = SamplingParams(stop=("\ufffd",), min_tokens=min_tokens, max_tokens=2)
        assert AnswerWriter(tokenizer, (), params).push(token_ids, FinishReason.LENGTH).text == text


def test_arguments_are_whole_if_the_model_ended_the_answer(tokenizer: Tokenizer) -> None:
    raw = '<tool_call>{"name": "add", "arguments": {"a": 1'
    rows: list[tuple[FinishReason, dict[str, Any], str]] = [
        (FinishReason.STOP, {}, '{"a": 1}'),
        (FinishReason.LENGTH, {}, '{"a": '),
        (FinishReason.LENGTH, {"stop": (" 1",)}, '{"a":null}'),
    ]
    for end, params, arguments in rows:
        calls = Calls(call_format.HERMES, {"add": Tool(name="add")}, CallIds("r", 0, 29))
        writer = AnswerWriter(tokenizer, (), SamplingParams(**params), channels=Channels(None, calls))
        token_ids = tokenizer.encode(raw) + [0] * (end is FinishReason.STOP)
        (call,) = joined_calls(writer.push(token_ids, end).tool_calls)
        assert call.arguments == arguments
