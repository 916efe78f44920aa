"""Declarations of the fields of OpenAI's and vLLM's bodies that are not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api.fields import Refusal

WITHOUT_EFFECT: Mapping[str, str] = {
    "metadata": "it is stored with answers, and answers are not stored",
    "prompt_cache_key": "the prefix cache works automatically, across all requests",
    "prompt_cache_options": "prefixes are cached until their space is needed",
    "prompt_cache_retention": "prefixes are cached until their space is needed",
    "prediction": "it could only make an answer faster",
    "safety_identifier": "it identifies the client's own user",
    "service_tier": "`priority` and the tenant's SLO class set the priority",
    "store": "answers are not stored",
    "user": "it identifies the client's own user",
    "verbosity": "no known chat template reads it; chat_template_kwargs can set it",
}
"""Fields that are accepted, and change no answer -> why."""

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
"""Fields of llama.cpp, SGLang, TGI and other servers -> their values that ask for what happens anyway."""

REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal("answers are text only"),
    "chat_template": Refusal("templates are programs; only the model's own is used"),
    "detokenize": Refusal("answers over HTTP are text; gRPC has `skip_text`", (True,)),
    "function_call": Refusal("superseded by tool_choice", ("none", "auto")),
    "functions": Refusal("superseded by tools", ([],)),
    "max_logprobs": Refusal("the limit is 20 log probabilities per token"),
    "modalities": Refusal("answers are text only", (["text"],)),
    "moderation": Refusal("the operator decides (docs/moderation.md)"),
    "parallel_tool_calls": Refusal("completions have no tools", (True, False)),
    "spaces_between_special_tokens": Refusal("the tokenizer decides the spaces", (True,)),
    "suffix": Refusal("text cannot be inserted before a suffix", ("",)),
    "tool_choice": Refusal("completions have no tools", ("none", "auto")),
    "tools": Refusal("completions have no tools", ([],)),
    "top_logprobs": Refusal("set logprobs to the number instead", (0,)),
    "web_search_options": Refusal("the cluster does not search the web"),
    **{name: Refusal(_OTHER_SAMPLING, neutral) for name, neutral in _OF_OTHER_SAMPLERS.items()},
}
"""Fields that neither body serves, or only one of the two -> their refusal in the others."""
