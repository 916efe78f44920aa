"""Declarations for the fields that clients may send: served, refused, or without effect.

A body declares the fields that are served. For others an API declares which it refuses and why, and which have no
effect: in a mapping for fields of a whole body, or on a field of a nested model (`Annotated[Any, Refusal(...)]`). All
other fields are unknown. The validation, `/openapi.json` and docs/http.md derive from these declarations.

An unknown field is ignored if its value asks for nothing (null, false, an empty text, list or object), or if its name
marks it as the client's own (`MARKS`). Ignored fields are named in a header and a metric. Any other unknown field is
refused, because it might change the answer. `router.strict` refuses all unknown fields.

Objects that a `type` or a `role` distinguishes (`ByType`), and a text in place of a list (`OrText`), have unions of
their own: pydantic's put the names of their members into the path of an error. An error here names the client's field.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from baton.chat import asks_for_nothing, check_asks_for_nothing
from baton.errors import InvalidRequest, UnknownField

UNSUPPORTED = "unsupported"
"""Type of pydantic's error for a field that is refused by name."""
LEFT_OUT = "left_out"
"""Type of pydantic's error for a member of a list that is refused with `router.strict`, and dropped without."""
IGNORED_HEADER = "x-baton-ignored"
MAX_NAMED = 16
"""Maximum number of fields that one header names."""
MAX_NAME = 64
"""Maximum length of a name in the header, in characters."""
MAX_ERRORS = 256
"""Maximum number of validation errors that are examined one by one; a body with more is refused."""
MAX_READINGS = 2
"""Maximum number of validations that may each remove ignored fields: an error in one field may hide another."""
MARKS = frozenset(
    (
        # ids and names of the client's own things
        "id", "opts", "uuid", "key", "client", "client_info", "client_metadata", "client_request_id", "metadata",
        "meta", "extra", "extra_metadata", "provider_specific_fields", "model_info", "user_agent", "app", "source",
        "tags", "labels", "title", "timestamp", "timestamps", "created", "created_at", "updated_at", "date", "status",
        "phase", "object", "owner", "author", "session", "conversation_title", "end_user", "customer_identifier",
        "ip_address", "tenant", "type", "model", "index", "weight", "recipient", "channel", "agent",
        "additional_kwargs", "createdAt", "updatedAt", "ts", "done", "sources", "statusHistory", "childrenIds",
        "lastSentence", "modelName", "modelIdx", "followUps", "display_name", "displayName", "artifact", "tool_name",
        "extras", "verbosity", "betas", "anthropic_beta", "anthropic_version", "providerOptions", "provider_options",
        "providerMetadata", "experimental_providerMetadata", "internal_chat_message_metadata_passthrough",
        # hints for caches
        "cache_control", "cache", "cache_prompt", "cache_salt", "caching", "cache_key", "prompt_cache_breakpoint",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "use_cache", "no_cache", "ttl",
        "keep_alive", "id_slot", "slot_id", "safety_identifier", "user", "user_id",
        # tracing, logging and billing
        "trace", "traceparent", "tracestate", "trace_metadata", "trace_name", "trace_user_id", "span_id",
        "generation_name", "langfuse_prompt", "litellm_metadata", "litellm_params", "litellm_trace_id",
        "litellm_logging_obj", "litellm_session_id", "no-log", "logger_fn", "verbose", "spend_logs_metadata",
        "proxy_server_request", "disable_log",
        # how the client or a gateway in front of this cluster sends the request
        "provider", "route", "transforms", "models", "fallbacks", "timeout", "request_timeout", "stream_timeout",
        "max_retries", "num_retries", "drop_params", "allowed_openai_params", "additional_drop_params",
        "custom_llm_provider", "api_base", "api_version", "base_url", "organization", "extra_headers", "headers",
        "deployment_id", "service_tier", "speculative", "kv_transfer_params", "data_parallel_rank", "routing_key",
        "prediction",
        # fields of another service's reasoning or answer, except its text
        "thinking_blocks", "reasoning_details", "reasoning_signature", "thought_signature", "signature", "citations",
        "annotations", "encrypted_content", "finish_reason", "stop_reason", "logprobs_content", "token_count",
        "tokens", "usage", "cost", "latency", "timings", "extra_content", "parsed", "parsed_arguments", "thought",
        "reasoning_text", "reasoning_opaque", "copilot_cache_control", "end_turn", "stop_sequence",
        # parameters of samplers; enabling such a sampler is refused by name
        "mirostat_tau", "mirostat_eta", "repeat_last_n",
        # additional output that does not exist here
        "include", "include_usage", "timings_per_token", "return_progress", "return_hidden_states",
        "return_routed_experts", "return_meta_info", "usage_include", "include_obfuscation", "stream_usage",
        "prompt_filter_results", "post_sampling_probs", "return_images", "return_related_questions",
        "return_citations", "outputSchema", "output_schema", "input_examples", "defer_loading", "eager_input_streaming",
    )
)  # fmt: skip
"""Names of fields that change no answer, whatever they hold."""
CHOOSES = frozenset(
    ("adapter_id", "lora_id", "model_id", "prompt_id", "template_id", "voice_id", "previous_response_id")
)
"""Names that end like an id, but do affect the answer."""
T = TypeVar("T")
MAX_LISTED = 4096


@dataclass(frozen=True, slots=True)
class Refusal:
    """Declaration of a field that is refused unless its value asks for what happens anyway."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values that ask for what happens anyway. null always does."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.schema()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the field."""
        return {"enum": [*self.neutral, None], "description": f"Other values are refused: {self.why}."}

    def _checked(self, value: Any) -> Any:
        if not asks_for_nothing(value, self.neutral):
            raise PydanticCustomError(UNSUPPORTED, "is not supported: {why}; leave it out", {"why": self.why})
        return value


class NotesFields(Protocol):
    """Record of ignored fields. See `Ignored`."""

    def note(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """Declaration of a field that is accepted and changes no answer. The validation's context, if any, records it."""

    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(_noted, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"Has no effect: {self.why}."}


def _noted(value: Any, info: ValidationInfo[NotesFields | None]) -> Any:
    if value and info.context is not None and info.field_name is not None:
        info.context.note(info.field_name)
    return value


def is_empty(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, or an empty text, list or object."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


class Ignored:
    """Record of the ignored fields of one request's body.

    Args:
        is_strict: whether unknown fields are refused, whatever they hold.
    """

    __slots__ = ("is_strict", "names")

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.names: dict[str, None] = {}
        """Names of the fields, each once, at most MAX_NAMED."""

    def note(self, name: str) -> None:
        """Record an ignored field by its own name, without its path."""
        if len(self.names) < MAX_NAMED:
            self.names[name] = None

    def takes(self, name: str, value: Any) -> bool:
        """Return whether an unknown field changes no answer; if so, record it."""
        if self.is_strict or not (is_empty(value) or is_mark(name)):
            return False
        self.note(name)
        return True

    def check_unserved(self, fields: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
        """Check the fields of a body that the API does not serve.

        Args:
            refused: fields that the API refuses by name.

        Raises:
            InvalidRequest: a field is unknown and cannot be ignored.
            Unsupported: a field is refused.
        """
        for name, value in fields.items():
            refusal = refused.get(name)
            if refusal is None:
                if not self.takes(name, value):
                    raise UnknownField(f"unknown field {name[:80]!a}; remove it or correct its name", name)
            elif is_empty(value) and not self.is_strict and value is not None and not _is_asked(value, refusal):
                self.note(name)
            else:
                check_asks_for_nothing(name, value, refusal.neutral)

    def drop_from(self, fields: MutableMapping[str, Any], unknown: Iterable[str]) -> None:
        """Remove the unknown fields of an object that change no answer."""
        for name in list(unknown):
            if self.takes(name, fields[name]):
                del fields[name]

    def headers(self) -> dict[str, str]:
        """Return the header that names the fields, in printable ASCII and of bounded length."""
        if not self.names:
            return {}
        return {IGNORED_HEADER: ", ".join(_printable(name) for name in self.names)}


def _is_asked(value: Any, refusal: Refusal) -> bool:
    """Return whether the value is false and thereby asks for something, because true is what happens anyway."""
    return value is False and any(each is True for each in refusal.neutral)


def _printable(name: str) -> str:
    plain = "".join(character if "!" <= character <= "~" and character not in ',;"\\' else "?" for character in name)
    return plain[:MAX_NAME]


def without_ignored(value: Any, error: ValidationError, ignored: Ignored) -> bool:
    """Remove the fields from a body that failed validation and change no answer.

    Args:
        value: the body; changed in place.
        error: the validation error.

    Returns:
        Whether a field was removed, so that the body should be validated again.
    """
    if ignored.is_strict or error.error_count() > MAX_ERRORS:
        return False
    has_changed = False
    for each in reversed(
        error.errors(include_url=False, include_context=False)
    ):  # from the end, so list indices stay valid
        kind, where = each["type"], each["loc"]
        if kind not in ("extra_forbidden", UNSUPPORTED, LEFT_OUT) or not where:
            continue
        holder = value
        for step in where[:-1]:
            holder = holder[step]
        name: Any = where[-1]
        if kind == LEFT_OUT:
            ignored.note(str(holder[name]["type"]))
        elif kind == UNSUPPORTED and isinstance(name, str) and is_empty(holder[name]):
            ignored.note(name)
        elif kind == UNSUPPORTED or not ignored.takes(str(name), holder[name]):
            continue
        del holder[name]
        has_changed = True
    return has_changed


def is_mark(name: str) -> bool:
    """Return whether an unknown field changes no answer, judging by its name."""
    if name in MARKS:
        return True
    is_id = name.endswith(("_id", "Id", "_metadata")) or name.startswith(("x-", "x_", "_"))
    return is_id and name not in CHOOSES and not name.endswith("token_id")


def _of_some_length(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_LISTED:
        told = {"field_type": "List", "max_length": MAX_LISTED, "actual_length": len(value)}
        raise PydanticKnownError("too_long", told)
    return value


Listed = Annotated[list[T], Field(max_length=MAX_LISTED), BeforeValidator(_of_some_length)]
"""List in a body. Its length is checked before its values; the limit is above that of every single list field."""
Values = Annotated[list[T], Field(max_length=MAX_LISTED, fail_fast=True), BeforeValidator(_of_some_length)]
"""List of numbers or texts. An error names its first wrong value only."""


class StrictBody(BaseModel):
    """Body or field whose names and types are all checked."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DeclaredBody(BaseModel):
    """Body of an API that declares which further fields it refuses, and which fields have no effect."""

    model_config = ConfigDict(extra="allow", strict=True)

    refused: ClassVar[Mapping[str, Refusal]] = {}
    """Fields that the body does not have -> why they are refused."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Fields of the body that change no answer -> why."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the fields in the tables of docs/http.md."""
        schema = handler.resolve_ref_schema(handler(core))
        properties = schema["properties"]
        schema["properties"] = {name: refusal.schema() for name, refusal in cls.refused.items()} | properties
        for name, why in cls.without_effect.items():
            properties[name]["description"] = f"Has no effect: {why}."
        schema["additionalProperties"] = False
        return schema

    def check_fields(self, ignored: Ignored) -> None:
        """Record the fields that are ignored.

        Raises:
            InvalidRequest: a field is unknown.
            Unsupported: a field is refused.
        """
        if self.model_extra:
            ignored.check_unserved(self.model_extra, self.refused)
        for name in self.model_fields_set & self.without_effect.keys():
            if not is_empty(getattr(self, name)):
                ignored.note(name)


class StreamBody(DeclaredBody):
    """Body whose answer may come as a stream."""

    stream: bool | None = None
    stream_options: Any = None

    def check_fields(self, ignored: Ignored) -> None:
        """Record ignored fields, among them `stream_options` without `stream`, which `router.strict` refuses."""
        super().check_fields(ignored)
        if self.stream_options is not None and not self.stream:
            if ignored.is_strict:
                raise InvalidRequest("stream_options needs stream; set stream to true", "stream_options")
            ignored.note("stream_options")


def field_names(annotation: Any) -> set[str]:
    """Return the names of all fields that a body knows, at any depth."""
    names = set[str]().union(*map(field_names, typing.get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, each in annotation.model_fields.items():
            names |= {each.alias or name, *field_names(each.annotation)}
        names |= annotation.refused.keys() if issubclass(annotation, DeclaredBody) else set()
    return names


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ByType:
    """Annotation of a union of models that a field of the value distinguishes. Other members are literal texts."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Other values of the field that clients may send -> why they are refused."""
    default: str = ""
    """Value of the field in an object without it; empty: the field is required."""
    by: str = "type"
    """Name of the field."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Types of objects that are dropped from their list, unless `router.strict` refuses them -> why."""
    leaves_out: bool = False
    """True if objects of unknown types are dropped as well."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = typing.get_args(source) or (source,)
        models = {
            kind: each
            for each in members
            if isinstance(each, type) and issubclass(each, BaseModel)
            for kind in typing.get_args(each.model_fields[self.by].annotation)
        }
        texts = [text for each in members for text in typing.get_args(each) if isinstance(text, str)]

        def chosen(value: Any, _: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
            return self._chosen(value, models, texts, info.context)

        return core_schema.with_info_wrap_validator_function(chosen, handler(source))

    def _chosen(self, value: Any, models: Mapping[str, type[BaseModel]], texts: list[str], context: Any) -> Any:
        if isinstance(value, str) and value in texts:
            return value
        if not isinstance(value, dict):
            known = " or ".join((*texts, f"an object with a {self.by}"))
            raise PydanticCustomError("one_of_several", "must be {known}", {"known": known})
        kind = value.get(self.by) or self.default
        is_left_out = isinstance(kind, str) and (kind in self.left_out or bool(self.leaves_out and kind not in models))
        if isinstance(kind, str) and kind and (kind in self.refused or is_left_out):
            why = self.refused.get(kind) or self.left_out.get(kind, "it is not known")
            raise PydanticCustomError(
                LEFT_OUT if is_left_out else UNSUPPORTED,
                "of {by} {kind} is not supported: {why}; leave it out",
                {"by": self.by, "kind": kind[:80].encode("ascii", "backslashreplace").decode(), "why": why},
            )
        if not isinstance(kind, str) or kind not in models:
            what = {"by": self.by, "known": ", ".join(models)}
            raise PydanticCustomError("type", "must have a {by} out of: {known}", what)
        return models[kind].model_validate(value, context=context)


@dataclass(frozen=True, slots=True, eq=False)
class OrText:
    """Annotation of a union of a text and a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (of_list,) = (each for each in typing.get_args(source) if each is not str)
        return core_schema.no_info_wrap_validator_function(_text_or_list, handler.generate_schema(of_list))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def _text_or_list(value: Any, of_list: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_list", "must be a text or a list")
    return of_list(value)
