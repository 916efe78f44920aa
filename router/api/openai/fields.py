"""What becomes of the fields of OpenAI's and vLLM's bodies that are not served: the one declaration of it."""

from __future__ import annotations

from collections.abc import Mapping

from router.api.fields import Refusal

WITHOUT_EFFECT: Mapping[str, str] = {
    "metadata": "stored with stored answers; nothing is stored",
    "prompt_cache_key": "prefixes are found by their tokens, of whatever request",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "safety_identifier": "names the client's own user",
    "user": "names the client's own user",
}
"""Fields that are taken, and change no answer -> why."""

REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal("answers are text"),
    "chat_template": Refusal("a template is a program; the model's own is used"),
    "detokenize": Refusal("answers over HTTP are text; gRPC has `skip_text`", (True,)),
    "function_call": Refusal("superseded by tool_choice", ("none",)),
    "functions": Refusal("superseded by tools", ([],)),
    "max_logprobs": Refusal("at most 20 log probabilities come for a token"),
    "modalities": Refusal("answers are text", (["text"],)),
    "moderation": Refusal("the operator decides (docs/moderation.md)"),
    "parallel_tool_calls": Refusal("completions have no tools", (True, False)),
    "prediction": Refusal("not built yet"),
    "service_tier": Refusal("`priority` and the tenant's SLO class say what comes first", ("auto", "default")),
    "spaces_between_special_tokens": Refusal("special tokens stand as they are", (True,)),
    "suffix": Refusal("not built yet", ("",)),
    "tool_choice": Refusal("completions have no tools", ("none", "auto")),
    "tools": Refusal("completions have no tools", ([],)),
    "top_logprobs": Refusal("completions name their number in logprobs", (0,)),
    "verbosity": Refusal("no template is known to read it; chat_template_kwargs can set it", ("medium",)),
    "web_search_options": Refusal("the cluster searches nothing"),
}
"""Fields that no body serves, or only the other one's -> what becomes of them."""
