"""Translates field names in errors: the service uses gRPC's names, and each API of the HTTP port has its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from baton.errors import BatonError, InvalidRequest, UnknownField, Unsupported

_ANTHROPICS = {
    "chat_template_kwargs": "output_config.effort",
    "continue_final_message": "messages",
    "input": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_budget": "thinking.budget_tokens",
}
_RESPONSES = {"max_tokens": "max_output_tokens", "messages": "input", "structured_outputs": "text.format"}
NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {"input": "messages"},
    "/v1/completions": {"input": "prompt", "token_ids": "prompt"},
    "/v1/messages": _ANTHROPICS,
    "/v1/messages/count_tokens": _ANTHROPICS,
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
}
"""Path -> the service's name of a field -> its name there."""
_OF_TOOL_IN_CHATS = re.compile(r"(?<=\btools\[)(\d+\])\.function\.parameters\b")
_OF_TOOL: Mapping[str, str] = {"/v1/messages": "input_schema", "/v1/responses": "parameters"}
"""Path or its prefix -> the field of a tool that holds the schema of its arguments."""
_OF_STRUCTURE: Mapping[str, str] = {
    "output_config.format": "output_config.format.schema",
    "response_format": "response_format.json_schema.schema",
    "structured_outputs": "structured_outputs.json",
    "text.format": "text.format.schema",
}
"""Field that asks for a structure -> the field in it that holds the schema."""
_OF_GRPC = re.compile(r"\bsampling\.(?=[a-z])")


def in_words_of(path: str, error: BatonError, written: Mapping[str, str] | None = None) -> BatonError:
    """Return a copy of the error with the field names of the API at a path.

    Args:
        written: the service's name of a field -> the field that this request used for the same.
    """
    message, names = _OF_GRPC.sub("", str(error)), {**NAMES.get(path, {}), **(written or {})}
    found = copy.copy(error)
    if isinstance(found, (InvalidRequest, Unsupported)) and found.param and not isinstance(found, UnknownField):
        known, own = found.param, names.get(found.param, found.param)
        if own != known and ("_" in known or message.startswith(f"{known} ")):
            message = re.sub(rf"\b{re.escape(known)}\b", own, message)
        if own in _OF_STRUCTURE and message.startswith("schema"):
            message = f"{_OF_STRUCTURE[own]}{message.removeprefix('schema')}"
        schema = next((field for above, field in _OF_TOOL.items() if path.startswith(above)), "function.parameters")
        message, found.param = (_OF_TOOL_IN_CHATS.sub(rf"\1.{schema}", text) for text in (message, own))
    found.args = (message,)
    return found
