"""How errors look to Anthropic's clients."""

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
"""HTTP status -> type; others are errors of the request, or of the server."""
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
            },
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_NAMES = {
    "chat_template_kwargs": "output_config.effort",
    "continue_final_message": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}
"""What fields are called here that have another name in our other APIs."""


def error_body(error: BatonError | HTTPException, request_id: str | None) -> dict[str, Any]:
    """The body that says what went wrong; the message begins with the field to blame."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    else:
        status, message = error.http, str(error)
    if isinstance(error, (InvalidRequest, Unsupported)) and error.param:
        field = _NAMES.get(error.param, error.param)
        message = message if message.startswith(field) else f"{field}: {message}"
    kind = KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
