"""However an answer's text is split, its channels get the same, and their sum is what the marks say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models
from transformers.utils.chat_parsing import parse_response

from baton.api import Chat, PromptInput, Text, TokenIds
from baton.chat import ChatMessage
from baton.errors import InvalidRequest, ModelLoadError
from baton.sampling import FinishReason, SamplingParams
from baton.structure import StructuredOutputs
from router.answer import (
    AnswerFormat,
    AnswerWriter,
    Channels,
    Mark,
    Reasoning,
    ReasoningReader,
    Split,
    with_reasoning,
)
from router.answer.marks import MAX_HELD
from router.prompt import Tokenizer
from tests.support.chats import encoded
from tests.support.reasoning import reasoning_model

THINK = Reasoning(Mark.of({"open": "<think>"}, "open"), Mark.of({"close": "</think>"}, "close"))
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "</", " ", "\n", "a", "é🐈"]), max_size=12).map(
    "".join
)
CUTS = st.lists(st.integers(0, 60), max_size=12)
WORDS = StructuredOutputs(choice=("yes",))


def parts(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def channeled(reader: ReasoningReader | Channels, pieces: Sequence[str]) -> Split:
    """Content and reasoning."""
    deltas: list[Any] = [*map(reader.push, pieces), reader.flush()]
    return Split("".join(delta[0] for delta in deltas), "".join(delta[1] for delta in deltas))


def expected(text: str, *, is_open: bool) -> Split:
    """What the channels get of a whole text."""
    if not is_open:
        opened = re.match(r"\s*<think>", text)
        if opened is None:
            return Split(text)
        text = text[opened.end() :]
    reasoning, _, content = text.partition("</think>")
    return Split(content.lstrip(), reasoning.strip())


@settings(max_examples=400)
@given(TEXTS, CUTS, st.booleans())
@example(text="</think>", cuts=[3], is_open=True)
@example(text=" \n<think> a </think> \n a ", cuts=[1, 3, 5, 12, 13, 20, 22], is_open=False)
def test_any_split_gives_the_whole(text: str, cuts: list[int], is_open: bool) -> None:
    assert channeled(ReasoningReader(THINK, is_open=is_open), parts(text, cuts)) == expected(text, is_open=is_open)


LIBRARYS = {
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text", "content_args": {"strip": False}},
    },
}


@settings(max_examples=150)
@given(TEXTS, st.booleans())
def test_transformers_parser_reads_the_same(text: str, is_open: bool) -> None:
    """Where it reads one reasoning, at the begin: it looks for others in the content as well."""
    found = channeled(ReasoningReader(THINK, is_open=is_open), [text])
    prefix = "<assistant><think>" if is_open else "<assistant>"
    behind = text.partition("</think>")[2] if found.reasoning or is_open else text
    if "<think>" in behind:
        return
    message = parse_response(text, LIBRARYS, prefix=prefix)
    assert message.get("reasoning_content", "") == found.reasoning
    assert message.get("content", "").lstrip() == found.content.lstrip()


def test_what_is_no_part_of_a_mark_comes_at_once() -> None:
    channels = ReasoningReader(THINK)
    assert channels.push(" ") == Split()
    assert channels.push("<thi") == Split()
    states = [channels.is_reasoning]
    assert channels.push("nk>\n\nI") == Split("", "I")
    states.append(channels.is_reasoning)
    assert [channels.push(text).reasoning for text in (" see", " ", "<", "b", ".\n", "</thin", "k>", "\n")] == [
        " see", "", "", " <b", ".", "", "", "",
    ]  # fmt: skip
    assert [*states, channels.is_reasoning] == [False, True, False]
    assert [channels.push(text) for text in ("\n", " Yes", " <", "think>")] == [
        Split(), Split("Yes"), Split(" <"), Split("think>"),
    ]  # fmt: skip


def test_what_may_be_a_mark_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = " " * (MAX_HELD + 1)
    assert channeled(ReasoningReader(THINK), list(spaces)) == Split(spaces)
    assert ReasoningReader(THINK).push(spaces) == Split(spaces)
    endless = Reasoning(Mark.of({"open": "<"}, "open"), Mark.of({"close_pattern": "x.*!"}, "close"))
    monkeypatch.setattr("router.answer.channels.MAX_HELD", 100)
    channels = ReasoningReader(endless, is_open=True)
    given = "".join(channels.push(letter).reasoning for letter in "x" * 300)
    assert len(given) == 200


@pytest.mark.parametrize("cuts", [[], list(range(40))])
def test_a_mark_that_may_get_longer_is_waited_for(cuts: list[int]) -> None:
    marks = Reasoning(Mark.of({"open": ["<t>", "<t>ab"]}, "open"), Mark.of({"close_pattern": "END(ED)?"}, "close"))
    for text, delta in (
        ("<t>abxENDEDy", Split("y", "x")),
        ("<t>axENDEx", Split("Ex", "ax")),
        ("<t>xEND", Split("", "x")),
        ("<t>", Split()),
        ("<t>a", Split("", "a")),
    ):
        assert channeled(ReasoningReader(marks), parts(text, cuts)) == delta
    either = Reasoning(Mark.of({"open": "<t>"}, "open"), Mark.of({"close_pattern": "ENDED|D"}, "close"))
    assert channeled(ReasoningReader(either), parts("<t>xENDEDy", cuts)) == Split("y", "x"), "the earlier one"


def tokenizer_of(folder: Path, template: str = "", special: Sequence[str] = (), **config: Any) -> Tokenizer:
    """A tokenizer of one token a word."""
    folder.mkdir()
    words = {word: i for i, word in enumerate(("x", "Hi", "yes", "\n"))}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="x"))
    inner.add_special_tokens(list(special))
    inner.add_tokens(["<think>", "</think>", "<assistant>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return Tokenizer.load(folder)


def plan_of(tokenizer: Tokenizer, prompt: PromptInput) -> Any:
    ids = encoded(tokenizer, prompt) if isinstance(prompt, Chat) else [0]
    return AnswerFormat.load(tokenizer).plan(prompt, ids, tokenizer, SamplingParams())


def test_a_chat_template_tells_the_marks(tmp_path: Path) -> None:
    for number, (template, begin, end) in enumerate(
        (
            ("{{ '<think>' }}", "<think>", "</think>"),
            ("{{ content.split('</think>') }}", "<think>", "</think>"),
            ("[THINK]", "[THINK]", "[/THINK]"),
            ("<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        )
    ):
        found = AnswerFormat.load(tokenizer_of(tmp_path / str(number), template)).reasoning
        assert found is not None
        assert (found.opens.text, found.closes.text) == (begin, end)
    for number, template in enumerate(("", "{{ messages }} thinking")):
        assert AnswerFormat.load(tokenizer_of(tmp_path / f"none-{number}", template)).reasoning is None


def test_calls_in_a_form_that_is_not_known_are_text_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    field = {"open": "<c>", "content": "of a later release"}
    template = {"start_anchor": "a", "fields": {"tool_calls": field, "content": {"content": "text"}}}
    tokenizer = tokenizer_of(tmp_path / "own", "{{ tools }}", response_template=template)
    assert AnswerFormat.load(tokenizer).calls is None
    (said,) = [record.getMessage() for record in caplog.records if record.name == "router.answer.format"]
    assert said.startswith(f"{tmp_path / 'own'} has an unknown format of tool calls")


def test_a_models_own_response_template_wins(tmp_path: Path) -> None:
    field = {"open": "<t>", "close_pattern": r"</t>|\|END", "content": "text"}
    template = {"start_anchor": "a", "fields": {"thinking": field, "content": {"content": "text"}}}
    tokenizer = tokenizer_of(tmp_path / "own", "<think>", ["<t>", "|END", "<pad>"], response_template=template)
    found = AnswerFormat.load(tokenizer)
    assert found.reasoning is not None
    assert found.reasoning.begin_id == tokenizer.encode_fragment("<t>")[0]
    assert found.reasoning.end_ids == (), "it has no single text"
    assert {tokenizer.token(token_id) for token_id in found.shown_ids} == {"<t>", "|END"}
    none = {"start_anchor": "a", "fields": {"content": {"content": "text"}}}
    assert AnswerFormat.load(tokenizer_of(tmp_path / "none", "<think>", response_template=none)).reasoning is None
    for number, bad in enumerate(
        (
            7,
            {"fields": 7},
            {"fields": {"thinking": 7}},
            {"fields": {"thinking": {"open": "<t>"}}},
            {"fields": {"thinking": {**field, "open": ""}}},
            {"fields": {"thinking": {**field, "open": []}}},
            {"fields": {"thinking": {**field, "open_pattern": "a"}}},
            {"fields": {"thinking": {**field, "close_pattern": "("}}},
            {"fields": {"thinking": {**field, "close_pattern": "a*"}}},
        )
    ):
        with pytest.raises(ModelLoadError, match="response_template"):
            AnswerFormat.load(tokenizer_of(tmp_path / f"bad-{number}", response_template=bad))


def test_special_tokens_reach_the_marks(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "special", "[THINK]", ["[THINK]", "[/THINK]", "<pad>"])
    form = AnswerFormat.load(tokenizer)
    plan = form.plan(chat("Hi"), (), tokenizer, SamplingParams())
    assert plan is not None
    ids = [tokenizer.encode_fragment(text)[0] for text in ("[THINK]", "Hi", "<pad>", "[/THINK]", "yes", "<pad>")]
    for skips, end in ((True, ""), (False, "<pad>")):
        writer = AnswerWriter(tokenizer, (), SamplingParams(skip_special_tokens=skips), channels=plan.channels("r", 0))
        pieces = [writer.push([token_id], None) for token_id in ids]
        pieces.append(writer.push([], FinishReason.LENGTH))
        assert "".join(piece.text for piece in pieces) == ("yes" if skips else "yes <pad>")
        assert "".join(piece.reasoning for piece in pieces).replace(" ", "") == f"Hi{end}"
        assert [piece.num_reasoning_tokens for piece in pieces] == [1, 2, 3, 4, 4, 4, 4]


def chat(content: str, **fields: Any) -> Chat:
    return Chat(messages=(ChatMessage(role=fields.pop("role", "user"), content=content),), **fields)


def continued(content: str) -> Chat:
    return chat(content, role="assistant", add_generation_prompt=False, continue_final_message=True)


def test_where_answers_begin(tmp_path: Path, model_dir: Path) -> None:
    tokenizer = Tokenizer.load(reasoning_model(tmp_path, model_dir))
    opened = plan_of(tokenizer, chat("Hi", template_kwargs={"opens": True}))
    assert opened.is_open
    assert plan_of(tokenizer, chat("Hi <think>\n", template_kwargs={"opens": True})).is_open
    for content in ("Hi", "Hi<think>"):
        free = plan_of(tokenizer, chat(content))
        assert not free.is_open
    assert plan_of(tokenizer, continued("<think>Well")).is_open
    assert plan_of(tokenizer, continued("<think>Well</think>a<think>b")).is_open
    for none in (
        chat("Hi", template_kwargs={"opens": False}),
        chat("Hi <think>", add_generation_prompt=False),
        continued("<think>Well</think> Yes"),
        continued("Yes"),
        Text("Hi <think>"),
        TokenIds((0,)),
    ):
        assert plan_of(tokenizer, none) is None, none
    assert channeled(opened.channels("r", 0), ["a</think>b"]) == Split("b", "a")
    assert channeled(free.channels("r", 0), ["a</think>b"]) == Split("a</think>b")


def test_a_structure_begins_behind_the_reasoning(tmp_path: Path, model_dir: Path) -> None:
    one_token = tokenizer_of(tmp_path / "one", "{% if opens %}<assistant><think>{% endif %}Hi<think>")
    several = Tokenizer.load(reasoning_model(tmp_path_of(tmp_path), model_dir))
    structured, budgeted = SamplingParams(structured_outputs=WORDS), SamplingParams(thinking_budget=3)
    begin, end = (one_token.encode_fragment(text) for text in ("<think>", "</think>"))
    open_plan, free_plan = (
        plan_of(one_token, chat("Hi")),
        AnswerFormat.load(one_token).plan(chat("Hi"), (), one_token, SamplingParams()),
    )
    for params in (structured, budgeted):
        found = with_reasoning(params, open_plan)
        assert (found.reasoning_begin_id, found.reasoning_end_ids) == (None, tuple(end))
        found = with_reasoning(params, free_plan)
        assert (found.reasoning_begin_id, found.reasoning_end_ids) == (begin[0], tuple(end))
    assert with_reasoning(SamplingParams(), open_plan) == SamplingParams(), "nothing needs them"
    own = SamplingParams(structured_outputs=WORDS, reasoning_end_ids=(1,))
    assert with_reasoning(own, open_plan) == own
    unmarked = plan_of(several, chat("Hi"))
    for plan in (unmarked, None):
        assert with_reasoning(structured, plan) == structured, "no one token begins a reasoning: there is none"
        with pytest.raises(InvalidRequest, match="thinking_budget") as refusal:
            with_reasoning(budgeted, plan)
        assert refusal.value.param == "thinking_budget"
    opened = plan_of(several, chat("Hi", template_kwargs={"opens": True}))
    assert with_reasoning(budgeted, opened).reasoning_end_ids == tuple(several.encode_fragment("</think>"))


def tmp_path_of(folder: Path) -> Path:
    (inner := folder / "several").mkdir()
    return inner
