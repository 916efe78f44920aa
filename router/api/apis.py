"""All APIs of the HTTP port: their endpoints, the document of them, and whose form an error takes."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from baton.errors import BatonError
from router.api import anthropic, openai, responses
from router.api.document import OPENAPI_PATH, document
from router.api.operators import OPERATORS
from router.api.unserved import is_anthropics
from router.service import RouterService

APIS = (openai.OPENAI, responses.RESPONSES, anthropic.ANTHROPIC, OPERATORS)


def add_apis(app: FastAPI, service: RouterService) -> None:
    """Adds the endpoints of all APIs, and the document of them."""
    openai.add_endpoints(app, service)
    responses.add_endpoints(app, service)
    anthropic.add_endpoints(app, service)

    @app.get(OPENAPI_PATH)
    async def openapi() -> JSONResponse:
        return JSONResponse(_document())


def error_body(path: str, error: BatonError | HTTPException, request_id: str | None) -> dict[str, Any]:
    """Returns the body that says what went wrong, in the form of the API to which the path belongs.

    Args:
        request_id: None: the request has none yet.
    """
    return anthropic.error_body(error, request_id) if is_anthropics(path) else openai.error_body(error)


@functools.cache
def _document() -> dict[str, Any]:
    return document(APIS)
