"""Fields that the bodies of OpenAI's completions endpoints share.

Fields of OpenAI's or vLLM's API that are not supported are refused by name, unless they ask for what happens anyway.
null stands for a field that is not set. `router.api.fields` handles unknown fields. Values of a wrong type are
refused: "0.5" is not a number, and 1.0 is not a count.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from baton.api import PromptInput, Text, TokenIds, Truncation, TruncationSide
from baton.errors import InvalidRequest
from baton.sampling import EarlyStopping, SamplingParams
from baton.structure import StructuredOutputs
from router.api.answering import MAX_PROMPTS
from router.api.fields import Refusal, StreamBody, StrictBody, Values, WithoutEffect
from router.prompt import Tokenizer

_SAME_NAME = {field.name for field in fields(SamplingParams)} - {"logprobs", "structured_outputs"}
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
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
NO_PROMPT = "prompt must be a string, a list of strings, or lists of token ids"


class JsonSchemaBody(StrictBody):
    """The field `response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    of_json: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted, but every schema is enforced."""


class ResponseFormatBody(StrictBody):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None
    of_json: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema of a json_object: an older spelling, which llama.cpp and Together support."""


class StructuredOutputsBody(StrictBody):
    """The field `structured_outputs`."""

    of_json: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Values[str] | None = None
    grammar: str | None = None


def structure_of(
    response_format: ResponseFormatBody | None, structured_outputs: StructuredOutputsBody | None
) -> StructuredOutputs | None:
    """Return the structure that a body asks for; None: free text.

    Raises:
        InvalidRequest: both fields ask for a structure, or one asks for several structures or for a too large one.
    """
    asked = response_format is not None and response_format.type != "text"
    if response_format and (response_format.type == "json_schema") != (response_format.json_schema is not None):
        raise InvalidRequest(
            "response_format.json_schema needs response_format.type json_schema; set both or none", "response_format"
        )
    if response_format and response_format.of_json is not None and response_format.type != "json_object":
        raise InvalidRequest(
            "response_format.schema needs response_format.type json_object; unset the schema", "response_format"
        )
    if asked and structured_outputs is not None:
        raise InvalidRequest(
            "response_format and structured_outputs cannot be combined; set one of them", "structured_outputs"
        )
    if structured_outputs is not None:
        return StructuredOutputs(
            json=_text(structured_outputs.of_json),
            json_object=bool(structured_outputs.json_object),
            regex=structured_outputs.regex or "",
            choice=tuple(structured_outputs.choice or ()),
            grammar=structured_outputs.grammar or "",
        )
    if response_format is None or not asked:
        return None
    if response_format.of_json is not None:
        return StructuredOutputs(json=_text(response_format.of_json))
    if response_format.json_schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=_text(response_format.json_schema.of_json))


def _text(schema: dict[str, Any] | bool | str | None) -> str:
    if schema is None:
        return ""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)


class SloBody(StrictBody):
    """The field `slo`, in milliseconds."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class StreamOptionsBody(StrictBody):
    """The field `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, every event carries the usage so far."""
    include_obfuscation: Annotated[bool | None, WithoutEffect("events are not padded to hide lengths")] = None


def _listed(value: Any) -> Any:
    return ([value] if value else []) if isinstance(value, str) else value


def _rule(value: Any) -> Any:
    """Return the value of `early_stopping` from JSON. Raises ValueError if it is invalid."""
    if value is not None and not isinstance(value, bool) and value != EarlyStopping.NEVER:
        raise ValueError('must be true, false or "never"')
    return None if value is None else EarlyStopping(str(value).lower())


def _plain(name: str, value: Any) -> Any:
    """Return the value of a field of `SamplingParams` from its value in JSON.

    Raises:
        InvalidRequest: a key of logit_bias is not a token id, or a token id is there twice.
    """
    if name == "logit_bias":
        if odd := [key for key in value if not (key.isascii() and key.isdigit() and len(key) < 20)]:
            raise InvalidRequest(f"logit_bias has the key {odd[0][:40]!a}; its keys must be token ids", name)
        if len({int(key) for key in value}) < len(value):
            raise InvalidRequest("logit_bias has a token id twice; set each token id once", name)
        return tuple(sorted((int(key), bias) for key, bias in value.items()))
    if name == "bad_word_ids":
        return tuple(map(tuple, value))
    return tuple(value) if isinstance(value, list) else value


def _side(value: Any) -> Any:
    """Return the value of `truncation_side` from JSON. Raises ValueError if it is invalid."""
    if value not in (None, *TruncationSide):
        raise ValueError("must be left or right")
    return None if value is None else TruncationSide(value)


class Body(StreamBody):
    """Fields that /v1/chat/completions and /v1/completions share."""

    refused = REFUSED
    without_effect = WITHOUT_EFFECT

    model: str | None = None
    stream_options: StreamOptionsBody | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[Values[str] | None, BeforeValidator(_listed)] = None
    stop_token_ids: Values[int] | None = None
    n: int | None = None
    best_of: int | None = None
    ignore_eos: bool | None = None
    logprob_token_ids: Values[int] | None = None
    prompt_logprobs: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Values[str] | None = None
    bad_word_ids: Values[Values[int]] | None = None
    allowed_token_ids: Values[int] | None = None
    typical_p: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_sequence_breakers: Values[str] | None = None
    dry_breaker_ids: Values[int] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    xtc_exempt_token_ids: Values[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormatBody | None = None
    structured_outputs: StructuredOutputsBody | None = None
    reasoning_end_ids: Values[int] | None = None
    reasoning_begin_id: int | None = None
    thinking_budget: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[EarlyStopping | None, BeforeValidator(_rule)] = None
    return_token_ids: bool | None = None
    """vLLM's: whether the answer includes the token ids of the prompt and of the answer."""
    request_id: str | None = None
    priority: int | None = None
    """vLLM's name. Unlike in vLLM, a higher value runs earlier."""
    slo: SloBody | None = None
    """Ours: objectives that replace those of the SLO class."""
    parse_special: bool | None = None
    """llama.cpp's name: whether text that is spelled like a special token becomes that token."""
    truncate_prompt_tokens: int | None = None
    truncation_side: Annotated[TruncationSide | None, BeforeValidator(_side)] = None
    # See `WITHOUT_EFFECT`.
    store: bool | None = None
    service_tier: str | None = None
    prediction: Any = None
    verbosity: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def written(self) -> dict[str, str]:
        """Return the service's name of a field -> the field that the client used for the same."""
        return {"structured_outputs": "response_format"} if self.structured_outputs is None else {}

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the client set, by the service's names.

        Raises:
            InvalidRequest: two fields contradict each other, or a field cannot be streamed; see `structure_of` too.
        """
        named = _SAME_NAME & self.model_fields_set
        asked = {name: _plain(name, value) for name in named if (value := getattr(self, name)) is not None}
        if self.stream and (self.best_of or 0) > (self.n or 1):
            raise InvalidRequest("best_of above n cannot be streamed; unset stream", "best_of")
        if self.stream and self.use_beam_search:
            raise InvalidRequest("use_beam_search cannot be streamed; unset stream", "use_beam_search")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs cannot be streamed; unset stream, or use echo with logprobs", "prompt_logprobs"
            )
        if structure := structure_of(self.response_format, self.structured_outputs):
            asked["structured_outputs"] = structure
        return asked

    @property
    def truncation(self) -> Truncation | None:
        """Truncation of the prompt, if any. Raises InvalidRequest if a side is set without a number of tokens."""
        if self.truncate_prompt_tokens is not None:
            return Truncation(self.truncate_prompt_tokens, self.truncation_side or TruncationSide.LEFT)
        if self.truncation_side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens; set both", "truncation_side")
        return None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


class CompletionBody(Body):
    """Request to continue a text."""

    prompt: Any
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: int | None = None
    echo: bool | None = None
    """True if the answer starts with the prompt, and its log probabilities with those of the prompt."""
    add_special_tokens: bool | None = None
    """True if the tokenizer's special tokens, such as BOS, are added to a text; None: they are."""

    def prompts(self, max_tokens: int) -> list[PromptInput]:
        """Return the prompts of the body.

        Args:
            max_tokens: maximum length of a prompt of token ids.

        Raises:
            InvalidRequest: `prompt` has a wrong type, more than MAX_PROMPTS prompts, or a prompt that is too long.
        """
        match self.prompt:
            case str(text):
                return [self._text(text)]
            case [str() | list(), *_] as prompts:
                if len(prompts) > MAX_PROMPTS:
                    raise InvalidRequest(f"prompt holds {len(prompts)} prompts; send at most {MAX_PROMPTS}", "prompt")
                if all(isinstance(item, str) for item in prompts):
                    return [self._text(item) for item in prompts]
                if all(isinstance(item, list) for item in prompts):
                    return [self._ids(item, max_tokens) for item in prompts]
            case list(ids):
                return [self._ids(ids, max_tokens)]
        raise InvalidRequest(NO_PROMPT, "prompt")

    def _ids(self, token_ids: list[Any], max_tokens: int) -> TokenIds:
        kept = TokenIds.of(token_ids, max_tokens, self.truncation)
        if not set(map(type, kept.ids)) <= {int}:
            raise InvalidRequest(NO_PROMPT, "prompt")
        return kept

    def _text(self, text: str) -> Text:
        return Text(text, bool(self.parse_special), self.add_special_tokens is not False)

    async def echoed(self, prompts: Sequence[PromptInput], tokenizer: Tokenizer) -> tuple[str, ...]:
        """Return the text of each prompt that its answers start with; empty: the client does not ask for an echo.

        Raises:
            InvalidRequest: the prompts may be truncated.
        """
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo cannot be combined with truncate_prompt_tokens; unset one of them", "echo")
        texts = []
        for prompt in prompts if self.echo else ():
            match prompt:
                case Text(text=text):
                    texts.append(text)
                case TokenIds(ids):
                    texts.append(await asyncio.to_thread(tokenizer.decode_all, ids))
        return tuple(texts)

    @property
    def is_scoring(self) -> bool:
        """True if the client wants only the prompt's scores, which OpenAI and vLLM express as an echo of 0 tokens."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        scores: dict[str, Any] = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.is_scoring:
            scores["max_tokens"] = 1  # the minimum; the client does not get this token
        if self.echo and self.logprobs is not None:
            scores["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return super().sampling() | scores
