"""Every field that clients may send is declared, and what is declared is what happens."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from baton.errors import InvalidRequest, Unsupported
from router.api.apis import REFUSALS, document
from router.api.fields import Ignored
from router.api.openai.body import REFUSED, WITHOUT_EFFECT, CompletionBody
from router.api.openai.chat import ChatBody
from tools import api_docs

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (ChatBody, (chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming)),
        (
            CompletionBody,
            (
                completion_create_params.CompletionCreateParamsBase,
                completion_create_params.CompletionCreateParamsStreaming,
            ),
        ),
    ],
)
def test_every_field_of_openais_client_is_known(body: Any, params: tuple[Any, ...]) -> None:
    names = {name for each in params for name in typing.get_type_hints(each)}
    assert len(names) > 15
    assert names - body.model_fields.keys() - REFUSED.keys() == set()


def test_declarations_do_not_contradict_each_other() -> None:
    for body in (ChatBody, CompletionBody):
        assert body.model_fields.keys() >= WITHOUT_EFFECT.keys(), "their types are checked"
    shared = ChatBody.model_fields.keys() & CompletionBody.model_fields.keys()
    assert not shared & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    for value in (*REFUSED[name].neutral, None):
        Ignored(is_strict=True).check_unserved({name: value}, REFUSED)
    with pytest.raises(Unsupported) as refusal:
        Ignored().check_unserved({name: {"other": 1}}, REFUSED)
    assert refusal.value.param == name


def test_what_is_not_declared_is_not_known() -> None:
    with pytest.raises(InvalidRequest, match="unknown field 'hot'"):
        Ignored().check_unserved({"hot": 1}, REFUSED)


def test_the_document_describes_bodies_that_are_served() -> None:
    served = document(api_docs.ROUTES)
    assert served["openapi"].startswith("3.1")
    assert json.loads(json.dumps(served)) == served
    for item in served["paths"].values():
        for operation in item.values():
            assert operation["responses"].keys() == {"200", *REFUSALS}, "and none of FastAPI's own"
    answers = {
        path: item["post"]["responses"]["200"]["content"] for path, item in served["paths"].items() if "post" in item
    }
    streamed = {path for path, content in answers.items() if "text/event-stream" in content}
    assert streamed == {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
    assert all("schema" in content["application/json"] for content in answers.values())
    schemas = served["components"]["schemas"]
    assert not [name for name in schemas if "Validation" in name]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len(api_docs.BODIES) > 3
    for path, body in api_docs.BODIES.items():
        content = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["properties"].keys() >= {field.alias or name for name, field in body.model_fields.items()}
        assert schemas[name]["additionalProperties"] is False
    whole = {"$ref": "#/components/schemas/ChatBody", "components": served["components"]}
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "modalities": ["text"], "tools": None}
    jsonschema.validate(asked, whole)
    for wrong in ({"max_tokens": "3"}, {"hot": 1}, {"modalities": ["audio"]}, {"messages": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**asked, **wrong}, whole)


def test_the_page_has_todays_fields() -> None:
    page = ROOT / api_docs.PAGE
    assert page.read_text() == api_docs.written(page), "run `python -m tools.api_docs`"
