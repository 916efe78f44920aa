"""Errors in the format of Anthropic's API."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from baton.errors import BatonError, InvalidRequest, Unsupported

ERROR_NAME = "MessageError"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> error type. Other statuses are `invalid_request_error`, or `api_error` from 500 on."""
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"enum": ["invalid_request_error", "api_error", *KINDS.values()]},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}
THREAD = "thread"
_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
"""Error details that make the tool loop of Anthropic's client retry without a thread."""


def error_body(error: BatonError | HTTPException, request_id: str) -> dict[str, Any]:
    """Return the body of an error response. The message starts with the name of the invalid field."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    else:
        status, message = error.http, str(error)
    if isinstance(error, (InvalidRequest, Unsupported)) and error.param:
        message = message if message.startswith(error.param) else f"{error.param}: {message}"
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": message}
    if isinstance(error, Unsupported) and error.param == THREAD:
        told["details"] = _NO_THREAD
    return {"type": "error", "error": told, "request_id": request_id}
