"""The fields of a response that echo its request."""

from __future__ import annotations

from typing import Any

from router.api.responses.body import ResponsesBody
from router.api.responses.text import TextBody


def head_of(body: ResponsesBody, *, response_id: str, created_at: int, model: str) -> dict[str, Any]:
    """Return a response without its output: the request's fields as OpenAI echoes them, null if not set.

    Args:
        created_at: in seconds since 1970.
    """
    choice, reasoning = body.tool_choice, body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": (body.text or TextBody()).echoed(),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "tools": [tool.echoed() for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
