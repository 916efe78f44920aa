"""What becomes of the fields of OpenAI's and vLLM's bodies that are not served: the one declaration of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api.fields import Refusal

WITHOUT_EFFECT: Mapping[str, str] = {
    "metadata": "stored with stored answers; nothing is stored",
    "prompt_cache_key": "prefixes are found by their tokens, of whatever request",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prediction": "tokens that the client expects would save time alone",
    "safety_identifier": "names the client's own user",
    "service_tier": "`priority` and the tenant's SLO class say what comes first",
    "store": "nothing is stored",
    "user": "names the client's own user",
    "verbosity": "no template is known to read it; chat_template_kwargs can set it",
}
"""Fields that are taken, and change no answer -> why."""

_OTHER_SAMPLING = "it is an option of other servers"
_OF_OTHER_SAMPLERS: Mapping[str, tuple[Any, ...]] = {
    "citation_options": ("disabled",),
    "disable_search": (True,),
    "do_sample": (True,),
    "dry_penalty_last_n": (-1,),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "logits_processors": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "n_cache_reuse": (0,),
    "n_indent": (0,),
    "n_keep": (0, -1),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "reasoning_budget": (-1,),
    "reasoning_format": ("auto",),
    "repeat_penalty": (1,),
    "search_parameters": ({"mode": "off"},),
    "separate_reasoning": (True,),
    "smoothing_factor": (0,),
    "stream_reasoning": (True,),
    "t_max_predict_ms": (0, -1),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
}
"""Fields of llama.cpp's, SGLang's, TGI's and others' -> values of them that ask for what happens anyway."""

REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal("answers are text"),
    "chat_template": Refusal("a template is a program; the model's own is used"),
    "detokenize": Refusal("answers over HTTP are text; gRPC has `skip_text`", (True,)),
    "function_call": Refusal("superseded by tool_choice", ("none", "auto")),
    "functions": Refusal("superseded by tools", ([],)),
    "max_logprobs": Refusal("at most 20 log probabilities come for a token"),
    "modalities": Refusal("answers are text", (["text"],)),
    "moderation": Refusal("the operator decides (docs/moderation.md)"),
    "parallel_tool_calls": Refusal("completions have no tools", (True, False)),
    "spaces_between_special_tokens": Refusal("special tokens stand as they are", (True,)),
    "suffix": Refusal("not built yet", ("",)),
    "tool_choice": Refusal("completions have no tools", ("none", "auto")),
    "tools": Refusal("completions have no tools", ([],)),
    "top_logprobs": Refusal("completions name their number in logprobs", (0,)),
    "web_search_options": Refusal("the cluster searches nothing"),
    **{name: Refusal(_OTHER_SAMPLING, neutral) for name, neutral in _OF_OTHER_SAMPLERS.items()},
}
"""Fields that no body serves, or only the other one's -> what becomes of them."""
