"""How errors look to OpenAI's clients."""

from __future__ import annotations

from typing import Any

from baton.errors import BatonError, InvalidRequest, Overloaded, Unauthenticated, Unsupported


def error_body(error: BatonError) -> dict[str, Any]:
    """The body that says what went wrong; `param` names the field to blame."""
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
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
