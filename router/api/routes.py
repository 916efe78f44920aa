"""Routes of endpoints that take a body: FastAPI describes it in the OpenAPI document, and `read_body` reads it.

An endpoint declares its body as a `Reader`:

    @app.post("/v1/orders")
    async def order(request: Request, read: Reader[OrderBody]) -> Response:
        body = await read()
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import request_response

from router.api.exchange import read_body

if TYPE_CHECKING:
    AnyBody = TypeVar("AnyBody", bound=BaseModel)
    Reader = Callable[[], Awaitable[AnyBody]]
else:

    class Reader:
        """Stands for `Reader` when FastAPI evaluates the annotation `Reader[Body]`, and gives it the body."""

        def __class_getitem__(cls, body: type[BaseModel]) -> type[BaseModel]:
            return body


_TEXT = {"type": "string"}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Description of answers that may be streams: in OpenAPI 3.1 the schema of a stream describes one event."""


def answers(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the description of answers with this JSON schema."""
    return {200: {"content": {"application/json": {"schema": schema}}}}


class BodyRoute(APIRoute):
    """Route that calls its endpoint with the request, the `Reader` of its body and the names in its path.

    FastAPI's own route would read the body without bounds. If the reader were a dependency, HTTP would cost a fifth
    more processor time for each request.
    """

    body: type[BaseModel] | None = None
    """The model of the body, if the endpoint takes one."""

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.body_field is None:
            return
        kind: Any = self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            return await endpoint(request, functools.partial(read_body, request, kind), **request.path_params)

        self.body, self.app = kind, request_response(handle)
