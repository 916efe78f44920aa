"""All APIs of the HTTP port: their endpoints, the document of them, and whose form an error takes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from baton.errors import BatonError
from router.api import anthropic, openai, responses
from router.api.document import OPENAPI_PATH, document
from router.api.exchange import ascii_json
from router.api.marks import MARKS
from router.api.methods import LongText
from router.api.operators import OPERATORS
from router.api.unserved import is_anthropics
from router.api.words import in_words_of
from router.service import RouterService

LONGEST_TOLD = 2000
"""Characters of an error's message, or of the field's name."""
APIS = (openai.OPENAI, responses.RESPONSES, anthropic.ANTHROPIC, OPERATORS)
FIELD_NAMES = frozenset(MARKS | responses.REFUSED_TOOLS.keys()).union(
    *(endpoint.field_names() for api in APIS for endpoint in api.endpoints.values())
)
"""Names of fields of all APIs, at any depth, and of what clients are known to send beside them: the labels of metrics,
which have to be of a bounded number."""


def add_apis(app: FastAPI, service: RouterService) -> None:
    """Adds the endpoints of all APIs, and the document of them."""
    openai.add_endpoints(app, service)
    responses.add_endpoints(app, service)
    anthropic.add_endpoints(app, service)

    @app.get(OPENAPI_PATH)
    async def openapi(request: Request) -> Response:
        return _document().answer(request, "application/json")


def error_body(
    path: str, error: BatonError | HTTPException, request_id: str, written: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the body that says what went wrong, in the form and in the words of the API to which the path belongs.

    Args:
        written: see `in_words_of`.
    """
    if isinstance(error, BatonError):
        error = in_words_of(path, error, written)
    body = anthropic.error_body(error, request_id) if is_anthropics(path) else openai.error_body(error)
    # What a client sent may be quoted in it.
    told = {name: text[:LONGEST_TOLD] if isinstance(text, str) else text for name, text in body["error"].items()}
    return {**body, "error": told}


@functools.cache
def _document() -> LongText:
    """Written once: anybody may ask for it, and that costs a hundred times as much as another small request."""
    return LongText(ascii_json(document(APIS)))
