"""Every field of a Responses request is served, refused by name, or declared to have no effect, at any depth."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typing_extensions
from openai.types import shared_params
from openai.types.responses import input_token_count_params as count_params
from openai.types.responses import response_create_params as params
from openai.types.responses import response_format_text_config_param as formats
from openai.types.responses import response_function_call_output_item_param as outputs
from openai.types.responses import response_input_message_content_list_param as contents
from openai.types.responses import response_input_param as inputs
from openai.types.responses import response_output_message_param as messages
from openai.types.responses import response_reasoning_item_param as reasonings
from openai.types.responses import response_text_config_param as texts
from openai.types.responses import tool_choice_allowed_param as allowed
from openai.types.responses import tool_choice_function_param as choices
from openai.types.responses import tool_param as tools
from pydantic import BaseModel

from baton.sampling import SamplingParams
from router.api.openai.chat import ChatBody
from router.api.responses import body as bodies
from router.api.responses import tools as our_tools
from router.api.responses.body import REFUSED, REFUSED_OF_INPUT, WITHOUT_EFFECT


def members(union: Any) -> list[Any]:
    return [each for each in typing.get_args(union) if typing_extensions.is_typeddict(each)]


def types_of(kind: Any) -> set[str]:
    named = typing.get_type_hints(kind)["type"]
    return {text for each in (named, *typing.get_args(named)) for text in typing.get_args(each) or (each,) if text}


def by_type(union: Any) -> Iterator[tuple[str, Any]]:
    for kind in members(union):
        for name in types_of(kind):
            if isinstance(name, str):
                yield name, kind


def fields_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


SERVED: dict[str, type[BaseModel]] = {
    "function": our_tools.FunctionToolBody,
    "function_call": bodies.FunctionCallItem,
    "function_call_output": bodies.FunctionCallOutputItem,
    "input_image": bodies.InputImagePart,
    "input_text": bodies.InputTextPart,
    "custom_tool_call": bodies.CustomCallItem,
    "custom_tool_call_output": bodies.FunctionCallOutputItem,
    "refusal": bodies.RefusalPart,
    "json_object": bodies.JsonObjectFormat,
    "json_schema": bodies.JsonSchemaFormat,
    "message": bodies.MessageItem,
    "namespace": our_tools.NamespaceToolBody,
    "output_text": bodies.OutputTextPart,
    "reasoning": bodies.ReasoningItem,
    "text": bodies.PlainTextFormat,
}


@pytest.mark.parametrize(
    ("union", "refused", "at_least"),
    [
        (inputs.ResponseInputItemParam, {**bodies.REFUSED_ITEMS, **bodies.LEFT_OUT_ITEMS}, 30),
        (tools.ToolParam, our_tools.REFUSED_TOOLS, 15),
        (contents.ResponseInputContentParam, bodies.REFUSED_PARTS, 3),
        (outputs.ResponseFunctionCallOutputItemParam, bodies.REFUSED_PARTS, 3),
        (messages.Content, bodies.REFUSED_PARTS, 2),
        (formats.ResponseFormatTextConfigParam, {}, 3),
    ],
    ids=["items", "tools", "contents", "outputs", "answers", "formats"],
)
def test_every_kind_of_openais_client_is_known(union: Any, refused: Mapping[str, str], at_least: int) -> None:
    found = list(by_type(union))
    assert len(found) >= at_least
    for name, kind in found:
        if name not in refused:
            assert set(typing.get_type_hints(kind)) - fields_of(SERVED[name]) == set(), name


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (params.StreamOptions, bodies.EventOptionsBody),
        (shared_params.Reasoning, bodies.ReasoningBody),
        (texts.ResponseTextConfigParam, bodies.TextBody),
        (choices.ToolChoiceFunctionParam, our_tools.FunctionChoice),
        (allowed.ToolChoiceAllowedParam, our_tools.AllowedToolsChoice),
        (reasonings.Content, bodies.ReasoningTextPart),
        (reasonings.Summary, bodies.SummaryTextPart),
    ],
)
def test_every_field_at_depth_is_known(kind: Any, model: type[BaseModel]) -> None:
    assert set(typing.get_type_hints(kind)) == fields_of(model)


def test_every_choice_of_a_tool_is_known() -> None:
    kinds = {name for name, _ in by_type(params.ToolChoice)}
    assert len(kinds) > 10
    assert kinds - our_tools.REFUSED_CHOICES.keys() == {"function", "allowed_tools"}


def test_every_field_of_a_body_is_known() -> None:
    of_client = set(typing.get_type_hints(params.ResponseCreateParamsBase))
    of_client |= set(typing.get_type_hints(params.ResponseCreateParamsStreaming))
    assert len(of_client) > 30
    ours = fields_of(bodies.ResponsesBody)
    assert of_client - ours == REFUSED.keys(), "what is refused is a field of the client's"
    assert ours >= WITHOUT_EFFECT.keys()
    plain = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(bodies._SAMPLING) <= plain & ours
    assert ours - of_client <= ChatBody.model_fields.keys(), "ours have the names of a chat's"


def test_every_field_of_a_count_is_known() -> None:
    of_client = set(typing.get_type_hints(count_params.InputTokenCountParams))
    assert len(of_client) > 10
    assert of_client - fields_of(bodies.InputBody) == REFUSED_OF_INPUT.keys()
