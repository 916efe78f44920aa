"""How errors look to OpenAI's clients."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from baton.errors import BatonError, InvalidRequest, Overloaded, QuotaExceeded, Unauthenticated, Unsupported

ERROR_NAME = "Error"
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_body(error: BatonError | HTTPException) -> dict[str, Any]:
    """The body that says what went wrong; `param` names the field to blame."""
    if isinstance(error, HTTPException):
        return _body(str(error.detail), "invalid_request_error", None, None)
    is_clients_fault = isinstance(error, (InvalidRequest, Unauthenticated, Unsupported))
    kind = "invalid_request_error" if is_clients_fault else "server_error"
    if isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
    code = type(error).__name__
    if isinstance(error, Unauthenticated):
        code = "invalid_api_key"
    if isinstance(error, Unsupported):
        code = "unsupported_parameter"
    if isinstance(error, QuotaExceeded):
        code = "rate_limit_exceeded"
    return _body(str(error), kind, param, code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
