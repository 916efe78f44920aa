"""The bodies of /v1/chat/completions, and of /tokenize and /detokenize, which are vLLM's.

Messages, tools and tool choices of other services' formats are converted into OpenAI's format: some clients use one
format for several services: OpenAI's older `function_call`, tools and parts of the Responses API, tool choices of
Mistral and Anthropic. With `router.strict` the router converts none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

from baton.api import Chat, PromptInput, Text
from baton.chat import FIELDS, NEUTRAL_FIELDS, ChatMessage, check_num_messages, check_one_end
from baton.errors import InvalidRequest
from baton.model_files import read_json
from baton.tokenizer_file import special_tokens
from baton.tools import ANY_TOOL, Tool, ToolChoice
from router.api.efforts import Effort, Template, ThinkingSwitch, set_effort, set_switch, variables_of
from router.api.fields import DeclaredBody, Ignored, Listed, StrictBody, WithoutEffect, is_empty
from router.api.openai.body import Body
from router.prompt import Tokenizer

_CHAT_FIELDS = (
    "tools", "documents", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
_AS_IT_COMES = WithoutEffect("reasoning is returned in full, not summarized")


SAYS_NOTHING = ThinkingSwitch(None, "thinking")
ALLOWED = "allowed_tools"
_TEXTS = ("input_text", "output_text")
_IMAGES = ("image_url", "input_image")
_THOUGHTS = ("thinking", "reasoning")
_OF_FUNCTION = ("name", "description", "parameters", "strict")
_MESSAGE = frozenset((*FIELDS, *NEUTRAL_FIELDS))
_PART = frozenset(("type", "text", "image_url"))
_IMAGE = frozenset(("url",))
_CALL = frozenset(("id", "type", "index", "function"))
_CALLED = frozenset(("name", "arguments"))
_TOOL = frozenset(("type", "function"))
_FUNCTION = frozenset(("name", "description", "parameters", "strict"))


class AskedReasoningBody(StrictBody):
    """The field `reasoning`, which is OpenRouter's and OpenAI's, or Ollama's `think`."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """True if the reasoning is generated, but not returned."""
    max_tokens: int | None = Field(default=None, ge=0)
    summary: Annotated[Any, _AS_IT_COMES] = None
    generate_summary: Annotated[Any, _AS_IT_COMES] = None


class AskedThinkingBody(StrictBody):
    """The field `thinking`, which is Anthropic's, DeepSeek's and GLM's."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(default=None, ge=0)
    clear_thinking: Annotated[Any, WithoutEffect("the chat template decides which reasoning is in the prompt")] = None
    display: Annotated[Any, _AS_IT_COMES] = None


def _of_switch(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else {"effort": value} if isinstance(value, str) else value


def _of_kind(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


Said = TypeVar("Said", str, bool)


def _only(given: Mapping[str, Said | None]) -> tuple[str, Said] | None:
    """Return the first field that is set, and its value; None if no field is set.

    Raises:
        InvalidRequest: two fields have different values.
    """
    said = {field: value for field, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        raise InvalidRequest(f"{' and '.join(said)} contradict each other; set one of them", next(iter(said)))
    return next(iter(said.items()), None)


AskedReasoning = Annotated[AskedReasoningBody | None, BeforeValidator(_of_switch)]
AskedThinking = Annotated[AskedThinkingBody | None, BeforeValidator(_of_kind)]


class ThinkingFields(DeclaredBody):
    """Fields of a body that control the reasoning."""

    reasoning_effort: str | None = None
    """Value of the template's variable of the same name."""
    include_reasoning: bool | None = None
    """True if the answer includes the reasoning; None: it does. The reasoning is generated in any case."""
    reasoning: AskedReasoning = None
    thinking: AskedThinking = None
    enable_thinking: bool | None = None
    """Qwen's."""
    think: AskedReasoning = None
    """Ollama's."""

    def effort(self) -> Effort:
        """Return the reasoning effort. Raises InvalidRequest if two fields contradict each other."""
        if self.reasoning is None and self.think is None:
            return Effort(self.reasoning_effort, "reasoning_effort")
        given = {"reasoning_effort": self.reasoning_effort}
        given |= {
            f"{name}.effort": body.effort
            for name, body in (("reasoning", self.reasoning), ("think", self.think))
            if body is not None
        }
        field, effort = _only(given) or ("reasoning_effort", None)
        return Effort(effort, field)

    def switch(self) -> ThinkingSwitch:
        """Return the choice to reason at all. Raises InvalidRequest if two fields contradict each other."""
        if (self.thinking, self.reasoning, self.think, self.enable_thinking) == (None,) * 4:
            return SAYS_NOTHING
        given = {
            "enable_thinking": self.enable_thinking,
            "thinking": None if self.thinking is None else self.thinking.type != "disabled",
            "reasoning": None if self.reasoning is None else self.reasoning.enabled,
            "think": None if self.think is None else self.think.enabled,
        }
        said = _only(given)
        return SAYS_NOTHING if said is None else ThinkingSwitch(said[1], said[0])

    @property
    def budget(self) -> int | None:
        """Maximum number of reasoning tokens; None: the client does not set one."""
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return self.thinking.budget_tokens
        return next((asked.max_tokens for asked in (self.reasoning, self.think) if asked is not None), None)

    @property
    def skips_reasoning(self) -> bool:
        """True if the reasoning is counted, but not returned."""
        return self.include_reasoning is False or any(
            asked is not None and asked.exclude is True for asked in (self.reasoning, self.think)
        )


class TokenizeBody(ThinkingFields):
    """Request to tokenize a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    tools: Listed[Any] | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """True if the tokenizer's special tokens, such as BOS, are added to a text; None: they are."""
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    include_reasoning: Annotated[bool | None, WithoutEffect("it concerns answers only")] = None


def description_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe a tokenizer as vLLM does: its tokenizer_config.json, with the chat template in use.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    config = read_json(tokenizer.folder / "tokenizer_config.json")
    template = {"chat_template": tokenizer.chat_template.source} if tokenizer.chat_template.source else {}
    return {**config, **special_tokens(tokenizer.folder), **template}


class DetokenizeBody(StrictBody):
    """Request to convert tokens to text."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class ChatBody(Body, ThinkingFields):
    """Request to answer a chat."""

    messages: Listed[dict[str, Any]]
    tools: Listed[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompt(self, template: Template, ignored: Ignored) -> PromptInput:
        """Return the chat. See `chat_of` and `ToolChoice.parse`."""
        choice, allowed = _allowed(self.tool_choice if ignored.is_strict else choice_in_form(self.tool_choice))
        chat = chat_of(self, template, ignored, ToolChoice.parse(choice, self.parallel_tool_calls))
        return chat if allowed is None else with_allowed(chat, allowed)

    def written(self) -> dict[str, str]:
        found = super().written() | {"logprobs": "top_logprobs"}
        return found | ({"max_tokens": "max_completion_tokens"} if self.max_tokens is None else {})

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        most = self.max_completion_tokens
        if most is not None and asked.setdefault("max_tokens", most) != most:
            raise InvalidRequest("max_tokens is the older name of max_completion_tokens; set one of them", "max_tokens")
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        return asked


def chat_of(
    body: ChatBody | TokenizeBody, template: Template, ignored: Ignored, tool_choice: ToolChoice = ANY_TOOL
) -> Chat:
    """Return the chat of a body. Changes the body's messages and tools in place.

    Args:
        template: returns the model's template.
        ignored: records fields without effect.

    Raises:
        InvalidRequest: two fields contradict each other; see `ChatMessage.parse` and `Tool.parse` too.
        Unsupported: see `ChatMessage.parse` and `Tool.parse`.
    """
    messages, given = body.messages or [], body.tools or []
    check_num_messages(len(messages) or 1)
    if not ignored.is_strict:
        messages_in_form(messages)
        given = tools_in_form(given)
    tools = strip_tools(given, ignored)
    strip_messages(messages, ignored)
    variables = variables_of(body.chat_template_kwargs, template, ignored, has_tools=bool(tools))
    set_effort(variables, body.effort(), template, ignored, has_tools=bool(tools))
    set_switch(variables, body.switch(), template, ignored, has_tools=bool(tools))
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    check_one_end(begins=begins, continues=continues)
    return Chat(
        messages=tuple(ChatMessage.parse(message, index) for index, message in enumerate(messages)),
        tool_choice=tool_choice,
        tools=tuple(Tool.parse(tool, index) for index, tool in enumerate(tools)),
        documents=tuple(body.documents or ()),
        template_kwargs=variables,
        add_generation_prompt=begins,
        continue_final_message=continues,
        parse_special=bool(body.parse_special),
    )


def _allowed(choice: Any) -> tuple[Any, frozenset[str] | None]:
    """Split a tool choice into the choice itself and the names of the allowed tools; None: all are allowed.

    Raises:
        InvalidRequest: the choice does not have OpenAI's format.
    """
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED:
        return choice, None
    match choice.get(ALLOWED):
        case {"mode": "auto" | "required" as mode, "tools": list(tools)}:
            named = [tool["function"].get("name") if _is_function(tool) else None for tool in tools]
            names = [name for name in named if isinstance(name, str)]
            if names and all(name is not None or _is_hosted(tool) for name, tool in zip(named, tools, strict=True)):
                return mode, frozenset(names)
    raise InvalidRequest(
        "tool_choice.allowed_tools must have a mode, auto or required, and tools, a list of at least one function",
        "tool_choice",
    )


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "function"


def with_allowed(chat: Chat, names: frozenset[str]) -> Chat:
    """Return the chat with only the named tools. Raises InvalidRequest if a name is unknown."""
    if unknown := sorted(names - {tool.name for tool in chat.tools}):
        raise InvalidRequest(f"tool_choice allows {unknown[0][:80]!a}, which is not in tools", "tool_choice")
    return replace(chat, tools=tuple(tool for tool in chat.tools if tool.name in names))


def prompt_of(body: TokenizeBody, template: Template, ignored: Ignored) -> PromptInput:
    """Return the prompt of a body of /tokenize: a text or a chat. See `chat_of`.

    Raises:
        InvalidRequest: the body has none or both, or fields that belong to the other one; see `chat_of` too.
        Unsupported: see `chat_of`.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("set either prompt or messages", "prompt")
    others = _CHAT_FIELDS if body.messages is None else ("add_special_tokens",)
    if unfit := next((name for name in others if getattr(body, name) is not None), None):
        needed, given = ("messages", "prompt") if body.messages is None else ("prompt", "messages")
        raise InvalidRequest(f"{unfit} needs {needed} and cannot be combined with {given}; unset it", unfit)
    if body.messages is not None:
        return chat_of(body, template, ignored)
    return Text(body.prompt or "", bool(body.parse_special), body.add_special_tokens is not False)


def messages_in_form(messages: Iterable[Any]) -> None:
    """Convert messages, which are JSON values, into OpenAI's format in place. Unknown formats stay as they are."""
    waiting: list[str] = []
    """Ids of calls in the last assistant message that have no result yet."""
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        if isinstance(content := message.get("content"), list):
            message["content"] = _parts_in_form(message, content, is_assistant=role == "assistant")
        if role == "assistant":
            waiting = _assistant_in_form(message, index)
        elif role in ("tool", "function") and waiting and not message.get("tool_call_id"):
            message |= {"role": "tool", "tool_call_id": waiting.pop(0)}


def _assistant_in_form(message: dict[str, Any], index: int) -> list[str]:
    """Convert an assistant's refusal and calls into OpenAI's format, and return the ids of the calls."""
    if message.get("content") is None and isinstance(message.get("refusal"), str):
        message["content"] = message.pop("refusal")
    if message.get("function_call") and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    given = message.get("tool_calls")
    calls = [call for call in given if isinstance(call, dict)] if isinstance(given, list) else []
    for place, call in enumerate(calls):
        call["type"] = call.get("type") or "function"
        call["id"] = call.get("id") or f"call{index:03d}{place:02d}"  # nine characters, as Mistral's templates require
    return [call["id"] for call in calls]


def _parts_in_form(message: dict[str, Any], parts: list[Any], *, is_assistant: bool) -> list[Any]:
    thoughts: list[str] = []
    kept = []
    for part in parts:
        if isinstance(part, str):
            kept.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS or (isinstance(part, dict) and kind is None and "text" in part):
            part["type"] = "text"
        elif kind in _IMAGES and isinstance(part.get("image_url"), str):
            detail = {"detail": part.pop("detail")} if "detail" in part else {}
            part |= {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
        elif is_assistant and kind == "refusal":
            part |= {"type": "text", "text": part.pop("refusal", None)}
        elif is_assistant and kind in _THOUGHTS and (thought := _thought(part)) is not None:
            thoughts.append(thought)
            continue
        kept.append(part)
    if thoughts and message.get("reasoning_content") is None and message.get("reasoning") is None:
        message["reasoning_content"] = "\n".join(thoughts)
    return kept


def _thought(part: dict[str, Any]) -> str | None:
    """Return the text of a reasoning part, which may itself consist of parts; None: its format is unknown."""
    found = next((value for name in (*_THOUGHTS, "text") if (value := part.get(name)) is not None), "")
    if isinstance(found, list):
        given = [each.get("text") if isinstance(each, dict) else each for each in found]
        texts = [each for each in given if isinstance(each, str)]
        found = "".join(texts) if len(texts) == len(given) else None
    return found if isinstance(found, str) else None


def tools_in_form(tools: Iterable[Any]) -> list[Any]:
    """Return tools, which are JSON values, in OpenAI's format and without duplicates."""
    kept: list[Any] = []
    known: dict[str, Any] = {}
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") in (None, "", "function"):
            if "function" not in tool and isinstance(tool.get("name"), str):
                tool["function"] = {name: tool.pop(name) for name in _OF_FUNCTION if name in tool}
            if isinstance(function := tool.get("function"), dict):
                tool["type"] = "function"
                name = function.get("name")
                if isinstance(name, str) and known.setdefault(name, tool) is not tool and known[name] == tool:
                    continue
        kept.append(tool)
    return kept


def choice_in_form(choice: Any) -> Any:
    """Return a tool choice in OpenAI's format, or unchanged if its format is not known."""
    match choice:
        case "any":
            return "required"
        case {"type": "any" | "required", **more} if not more:
            return "required"
        case {"type": "auto" | "none" as use, **more} if not more:
            return use
        case {"type": "tool" | "function", "name": str(name), **more} if not more:
            return {"type": "function", "function": {"name": name}}
        case {"function": {"name": str()} as function, **more} if not more:
            return {"type": "function", "function": function}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools), **more} if not more:
            return {"type": ALLOWED, ALLOWED: {"mode": mode, "tools": tools_in_form(tools)}}
    return choice


def strip_messages(messages: Iterable[Any], ignored: Ignored) -> None:
    """Remove the fields that change no answer from messages, which are JSON values, and from their parts and calls."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        _strip(message, _MESSAGE, ignored)
        for name in NEUTRAL_FIELDS.keys() & message.keys():
            if message[name] is not None and (is_empty(message[name]) or name == "annotations"):
                ignored.drop_from(message, (name,))
        content = message.get("content")
        if content is None and message.get("role") in ("assistant", "tool", "function") and "content" in message:
            message["content"] = ""
        for part in content if isinstance(content, list) else ():
            _strip(part, _PART, ignored)
            if isinstance(part, dict) and isinstance(image := part.get("image_url"), dict):
                if isinstance(image.get("detail"), str):
                    ignored.note("detail")  # the model's own image processor decides
                    del image["detail"]
                _strip(image, _IMAGE, ignored)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            _strip(call, _CALL, ignored)
            _strip(call.get("function") if isinstance(call, dict) else None, _CALLED, ignored)


def strip_tools(tools: Iterable[Any], ignored: Ignored) -> list[Any]:
    """Return the function tools among tools, which are JSON values, without the fields that change no answer."""
    kept = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("", "function") and not ignored.is_strict:
            ignored.note(kind)
            continue
        kept.append(tool)
        _strip(tool, _TOOL, ignored)
        function = tool.get("function") if isinstance(tool, dict) else None
        _strip(function, _FUNCTION, ignored)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if isinstance(parameters, dict):
            for name in ("properties", "required"):
                if name in parameters and parameters[name] is None:
                    ignored.drop_from(parameters, (name,))
    return kept


def _strip(fields: Any, known: frozenset[str], ignored: Ignored) -> None:
    if isinstance(fields, dict) and (unknown := fields.keys() - known):
        ignored.drop_from(fields, sorted(unknown))
