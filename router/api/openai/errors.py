"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import re
from typing import Any

from starlette.exceptions import HTTPException

from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
    Unauthenticated,
    UnknownField,
    Unsupported,
)

ERROR_NAME = "Error"
MINUTE_S = 60.0
_CAPITAL = re.compile("[A-Z]")
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
    """Return the body of an error response; `param` names the invalid field."""
    if isinstance(error, HTTPException):
        return _body(str(error.detail), "invalid_request_error", None, None)
    is_clients_fault = isinstance(error, (InvalidRequest, Unauthenticated, Unsupported))
    kind = "invalid_request_error" if is_clients_fault else "server_error"
    if isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
    return _body(str(error), kind, param, code_of(error))


def code_of(error: BatonError) -> str:
    """Return the code of an error: OpenAI's code if there is one, else the name of the error's class."""
    match error:
        case ModelNotFound():
            return "model_not_found"
        case Unauthenticated():
            return "invalid_api_key"
        case Unsupported():
            return "unsupported_parameter"
        case QuotaExceeded(retry_after_s=retry_s) if retry_s > MINUTE_S:  # the day's limit is used up
            return "insufficient_quota"
        case Overloaded():
            return "rate_limit_exceeded"
        case ContextLengthExceeded():
            return "context_length_exceeded"
        case UnknownField():
            return "unknown_parameter"
        case InvalidRequest(param=None):
            return "invalid_request"
        case InvalidRequest() if type(error) is InvalidRequest:
            return "invalid_value"
    return _CAPITAL.sub(lambda found: f"_{found[0].lower()}", type(error).__name__).strip("_")


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
