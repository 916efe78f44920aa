"""Every feature of JSON Schema is enforced or refused by tool, path and keyword, whatever API a schema comes by; of
tools that are not strict, what can be enforced is, and nothing is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.grammar import GrammarCompiler
from baton.sampling import SamplingParams
from baton.structure import StructuredOutputs, loosened
from router.answer import call_format, with_tool_choice
from router.api.anthropic.body import MessageBody
from router.api.anthropic.endpoints import chat_of as messages_chat_of
from router.api.fields import Ignored
from router.api.openai.chat import ChatBody
from router.api.responses.body import ResponsesBody
from router.api.responses.endpoints import chat_of as responses_chat_of
from router.api.responses.tools import Functions
from router.prompt import Tokenizer
from tests.support.schema_features import FEATURES, NOTHING, Feature, whole_schema

MESSAGES = [{"role": "user", "content": "Hi"}]
HEAD, TAIL = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.folder / "tokenizer.json", tokenizer.vocab_size, tokenizer.eos_ids)


def of_chat(schema: Any, tokenizer: Tokenizer, *, strict: bool | None) -> StructuredOutputs | None:
    function = {"name": "f", "parameters": schema, "strict": strict}
    body = ChatBody.model_validate(
        {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    )
    prompt = body.prompt(lambda: tokenizer.chat_template, Ignored())
    return with_tool_choice(SamplingParams(), prompt, call_format.HERMES, tokenizer).structured_outputs


def of_responses(schema: Any, tokenizer: Tokenizer, *, strict: bool | None) -> StructuredOutputs | None:
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": bool(strict)}
    body = ResponsesBody.model_validate({"input": "Hi", "tools": [tool], "tool_choice": "required"})
    chat = responses_chat_of(body, Functions.of(body.tools or ()), lambda: tokenizer.chat_template, Ignored())
    return with_tool_choice(SamplingParams(), chat, call_format.HERMES, tokenizer).structured_outputs


def of_messages(schema: Any, tokenizer: Tokenizer, *, strict: bool | None) -> StructuredOutputs | None:
    tool = {"name": "f", "input_schema": schema, "strict": strict}
    body = MessageBody.model_validate(
        {"model": "", "max_tokens": 9, "messages": MESSAGES, "tools": [tool], "tool_choice": {"type": "any"}}
    )
    chat = messages_chat_of(body, tokenizer.chat_template, Ignored())
    return with_tool_choice(SamplingParams(), chat, call_format.HERMES, tokenizer).structured_outputs


def of_response_format(schema: Any, _: Tokenizer, *, strict: bool | None) -> StructuredOutputs | None:
    asked = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": strict}}
    body = ChatBody.model_validate({"messages": MESSAGES, "response_format": asked})
    structure = body.sampling()["structured_outputs"]
    assert isinstance(structure, StructuredOutputs)
    return structure


TOOLS = (of_chat, of_responses, of_messages)


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, structure: StructuredOutputs, text: str) -> bool:
    """Whether an answer may be this text, and end there."""
    matcher = compiler.compile(structure)
    try:
        for token_id in tokenizer.encode(text):
            matcher.allowed()
            matcher.take([token_id])
        end = tokenizer.eos_ids[0]
        return bool(matcher.allowed()[end // 8] >> end % 8 & 1)
    except InvalidRequest:
        return False


def served(compiler: GrammarCompiler, structure: StructuredOutputs | None) -> StructuredOutputs:
    assert structure is not None
    return loosened(structure, compiler.check(structure))


def written(value: Any, structure: StructuredOutputs) -> str:
    text = json.dumps({"x": value})
    return f"{HEAD}{text}{TAIL}" if structure.grammar else text


def asked_by(first: Callable[..., Any], *others: Callable[..., Any]) -> list[Any]:
    """Each feature by the first way to ask; of the other ways, which meet below the API, `make check` sees some."""
    cases = [pytest.param(feature, first, id=f"{feature.name}-{first.__name__}") for feature in FEATURES]
    for number, feature in enumerate(FEATURES):
        for place, ask in enumerate(others):
            marks = [] if number % 12 == place else [pytest.mark.slow]
            cases.append(pytest.param(feature, ask, id=f"{feature.name}-{ask.__name__}", marks=marks))
    return cases


def test_the_table_has_what_it_should() -> None:
    assert len(FEATURES) >= 65
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize(("feature", "ask"), asked_by(*TOOLS, of_response_format))
def test_a_feature_is_enforced_or_refused_by_its_path(
    compiler: GrammarCompiler, tokenizer: Tokenizer, feature: Feature, ask: Callable[..., StructuredOutputs | None]
) -> None:
    structure = ask(whole_schema(feature), tokenizer, strict=True)
    if feature.refused:
        with pytest.raises(InvalidRequest) as refusal:
            served(compiler, structure)
        place = "schema" if ask is of_response_format else "tools[0].function.parameters"
        assert str(refusal.value).startswith(f"{place}.{feature.where}: {feature.refused} cannot be enforced")
        assert refusal.value.param == ("structured_outputs" if place == "schema" else f"{place}.{feature.where}")
        return
    known = served(compiler, structure)
    assert takes(compiler, tokenizer, known, written(feature.good, known))
    if feature.bad is not NOTHING:
        assert not takes(compiler, tokenizer, known, written(feature.bad, known))


@pytest.mark.parametrize(("feature", "ask"), asked_by(*TOOLS))
def test_a_tool_that_is_not_strict_keeps_what_can_be_kept(
    compiler: GrammarCompiler, tokenizer: Tokenizer, feature: Feature, ask: Callable[..., StructuredOutputs | None]
) -> None:
    known = served(compiler, ask(whole_schema(feature), tokenizer, strict=None))
    assert takes(compiler, tokenizer, known, written(feature.good, known))
    assert not takes(compiler, tokenizer, known, f"{HEAD}{json.dumps({'y': feature.good})}{TAIL}")
    if feature.bad is not NOTHING:
        assert not takes(compiler, tokenizer, known, written(feature.bad, known))
