"""What becomes of the fields of a Responses body that are not served."""

from __future__ import annotations

from collections.abc import Mapping

from router.api.fields import Refusal

_NOTHING_STORED = "nothing is stored; send the whole conversation as input"

WITHOUT_EFFECT: Mapping[str, str] = {
    "context_management": "conversations are not compacted",
    "include": "nothing else can be included: a reasoning comes as text",
    "max_tool_calls": "limits calls of built-in tools, of which there are none",
    "metadata": "stored with stored answers; nothing is stored",
    "prompt_cache_key": "prefixes are found by their tokens, of whatever request",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "safety_identifier": "names the client's own user",
    "service_tier": "`priority` and the tenant's SLO class say what comes first",
    "store": "nothing is stored",
    "user": "names the client's own user",
}
"""Fields that are taken, and change no answer -> why."""

_REFUSED_OF_BOTH: Mapping[str, Refusal] = {
    "conversation": Refusal(_NOTHING_STORED),
    "previous_response_id": Refusal(_NOTHING_STORED),
    "truncation": Refusal("a prompt that does not fit is refused", ("disabled", "auto")),
}
REFUSED_OF_INPUT: Mapping[str, Refusal] = {
    **_REFUSED_OF_BOTH,
    "personality": Refusal("instructions say how a model speaks"),
}
"""Fields that are refused where tokens are counted -> why."""
REFUSED: Mapping[str, Refusal] = {
    **_REFUSED_OF_BOTH,
    "access_programs": Refusal("there are none"),
    "background": Refusal("nothing is stored, so nobody could fetch the answer", (False,)),
    "image": Refusal("prompts are text"),
    "moderation": Refusal("operators moderate, and clients do not"),
    "prompt": Refusal("templates of prompts are not stored; send the prompt as input"),
    "top_logprobs": Refusal("/v1/chat/completions has log probabilities", (0,)),
}
"""Fields that are refused -> why."""
