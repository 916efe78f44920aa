"""All APIs of the HTTP port: their endpoints, their OpenAPI document, and the format of their errors."""

from __future__ import annotations

import asyncio
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
from router.api.routes import BodyRoute
from router.api.strict import field_names
from router.api.unserved import is_anthropics
from router.api.words import in_words_of
from router.service import RouterService

LONGEST_TOLD = 2000
"""Maximum length of an error's message and of the field's name, in characters."""


def add_apis(app: FastAPI, service: RouterService) -> None:
    """Add the endpoints of all APIs, and the OpenAPI document of the application.

    Sets `app.state.field_names`: the names of the fields of all bodies, at any depth, and of further fields that
    clients are known to send. They are the label values of metrics, so their number must be bounded.
    """
    openai.add_endpoints(app, service)
    responses.add_endpoints(app, service)
    anthropic.add_endpoints(app, service)

    bodies = [route.body for route in app.routes if isinstance(route, BodyRoute) and route.body]
    app.state.field_names = frozenset(MARKS | responses.REFUSED_TOOLS.keys()).union(*map(field_names, bodies))

    @functools.cache
    def described() -> asyncio.Task[LongText]:
        # Any client may request it, and writing it takes as long as hundreds of requests: once, and in a thread.
        return asyncio.create_task(asyncio.to_thread(lambda: LongText(ascii_json(document(app.routes)))))

    @app.get(OPENAPI_PATH, include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return (await asyncio.shield(described())).answer(request, "application/json")


def error_body(
    path: str, error: BatonError | HTTPException, request_id: str, written: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the body of an error response, with the format and the field names of the API to which the path belongs.

    Args:
        written: see `in_words_of`.
    """
    if isinstance(error, BatonError):
        error = in_words_of(path, error, written)
    body = anthropic.error_body(error, request_id) if is_anthropics(path) else openai.error_body(error)
    # The message may quote text of the client, so its length must be bounded.
    told = {name: text[:LONGEST_TOLD] if isinstance(text, str) else text for name, text in body["error"].items()}
    return {**body, "error": told}
