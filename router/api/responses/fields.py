"""Declarations of the fields of a Responses body that are not served."""

from __future__ import annotations

from collections.abc import Mapping

from router.api.fields import Refusal

_NOTHING_STORED = "nothing is stored; send the whole conversation as input"

WITHOUT_EFFECT: Mapping[str, str] = {
    "context_management": "conversations are not compacted",
    "include": "there is no additional output; reasoning is returned as text",
    "max_tool_calls": "it limits calls of built-in tools, and there are none",
    "metadata": "it is stored with answers, and answers are not stored",
    "prompt_cache_key": "the prefix cache works automatically, across all requests",
    "prompt_cache_options": "prefixes are cached until their space is needed",
    "prompt_cache_retention": "prefixes are cached until their space is needed",
    "safety_identifier": "it identifies the client's own user",
    "service_tier": "`priority` and the tenant's SLO class set the priority",
    "store": "answers are not stored",
    "user": "it identifies the client's own user",
}
"""Fields that are accepted, and change no answer -> why."""

_REFUSED_OF_BOTH: Mapping[str, Refusal] = {
    "conversation": Refusal(_NOTHING_STORED),
    "previous_response_id": Refusal(_NOTHING_STORED),
    "truncation": Refusal("prompts that are too long are refused", ("disabled", "auto")),
}
REFUSED_OF_INPUT: Mapping[str, Refusal] = {
    **_REFUSED_OF_BOTH,
    "personality": Refusal("use `instructions` for the style of an answer"),
}
"""Fields that are refused when tokens are counted -> why."""
REFUSED: Mapping[str, Refusal] = {
    **_REFUSED_OF_BOTH,
    "access_programs": Refusal("there are no access programs"),
    "background": Refusal("answers are not stored, so a client could not fetch one later", (False,)),
    "image": Refusal("answers are text; send images as items of type input_image"),
    "moderation": Refusal("the operator decides (docs/moderation.md)"),
    "prompt": Refusal("prompt templates are not stored; send the prompt as input"),
    "top_logprobs": Refusal("use /v1/chat/completions for log probabilities", (0,)),
}
"""Fields that are refused -> why."""
