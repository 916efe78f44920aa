"""All APIs of the HTTP port: their endpoints, the document of them, and whose form an error takes."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from baton.errors import BatonError
from router.api import openai
from router.api.document import OPENAPI_PATH, document
from router.service import RouterService

APIS = (openai.OPENAI,)


def add_apis(app: FastAPI, service: RouterService) -> None:
    """Adds the endpoints of all APIs, and the document of them."""
    openai.add_endpoints(app, service)

    @app.get(OPENAPI_PATH)
    async def openapi() -> JSONResponse:
        return JSONResponse(_document())


def error_body(path: str, error: BatonError | HTTPException) -> dict[str, Any]:
    """Returns the body that says what went wrong, in the form of the API to which the path belongs."""
    return openai.error_body(error)


@functools.cache
def _document() -> dict[str, Any]:
    return document(APIS)
