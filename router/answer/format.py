"""Finds the marks with which a model separates reasoning and tool calls from content.

If tokenizer_config.json has a `response_template`, in the format of transformers 5
(utils/chat_parsing/response_templates.py), it decides. Otherwise the chat template is searched for the marks of known
models.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from baton.api import Chat, PromptInput
from baton.errors import InvalidRequest, ModelLoadError
from baton.model_files import read_json
from baton.sampling import SamplingParams
from baton.tools import Tool, ToolUse
from router.answer.call_format import HERMES, CallForm, form_of, known_form
from router.answer.calls import CallIds, Calls
from router.answer.channels import Channels
from router.answer.forced_calls import needs_grammar
from router.answer.marks import Mark, Reasoning
from router.answer.reasoning import ReasoningReader

if TYPE_CHECKING:
    from router.prompt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning field in response templates."""
KNOWN_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Marks around a reasoning: DeepSeek's, Qwen's and most others'; Mistral's; Seed's; Cohere's; Gemma's."""
MAX_TAIL = 64
"""Number of tokens at the end of a prompt that are searched for marks. It covers the generation prompt of templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Format of a model's answers to chats."""

    reasoning: Reasoning | None = None
    """None: the model does not reason, or does not mark its reasoning."""
    calls: CallForm | None = None
    """None: the model's tool calls cannot be read."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens in the marks."""

    @staticmethod
    def load(tokenizer: Tokenizer) -> AnswerFormat:
        """Read the format of a model. Logs a warning if its `response_template` has an unknown format of calls.

        Raises:
            ModelLoadError: its `response_template` is invalid.
        """
        fields = _fields_of(read_json(tokenizer.folder / "tokenizer_config.json").get("response_template"))
        template = tokenizer.chat_template
        marks = _known_marks(template.source) if fields is None else _marks_of(fields)
        reasoning, all_marks = None, list[Mark]()
        if marks is not None:
            begin, end = (tuple(tokenizer.encode_fragment(mark.text)) if mark.text else () for mark in marks)
            reasoning = Reasoning(*marks, begin[0] if len(begin) == 1 else None, end)
            all_marks += marks
        if template.asks_for_hermes:
            calls: CallForm | None = HERMES
        elif fields is not None and "tool_calls" in fields:
            calls = form_of(fields["tool_calls"])
            if calls is None:
                logger.warning("%s has an unknown format of tool calls, so they stay text", tokenizer.folder)
        else:
            calls = known_form(template.source_with_tools)
        all_marks += calls.marks if calls else ()
        special = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_ids}
        shown_ids = frozenset(i for i, text in special.items() if any(mark.names(text) for mark in all_marks))
        return AnswerFormat(reasoning=reasoning, calls=calls, shown_ids=shown_ids)

    def plan(
        self, prompt: PromptInput, prompt_ids: Sequence[int], tokenizer: Tokenizer, params: SamplingParams
    ) -> AnswerPlan | None:
        """Return the plan for the answers to a prompt; None: all of their text is content. Answers to texts have none.

        Args:
            prompt_ids: the tokens of the prompt.
            params: sampling parameters of the client. Structured content may contain marks in its texts, so calls are
                then read only at its start.
        """
        if not isinstance(prompt, Chat):
            return None
        is_open, may_begin = _place_of(self.reasoning, prompt, prompt_ids, tokenizer)
        reasoning = self.reasoning if is_open or may_begin else None
        calls = self.calls if prompt.tools and prompt.tool_choice.use is not ToolUse.NONE else None
        if reasoning is None and calls is None:
            return None
        if calls is not None and params.structured_outputs is not None:
            calls = replace(calls, only_at_begin=True)
        elif calls is not None and not needs_grammar(prompt, params):
            calls = calls.loose or calls
        tools = {tool.name: tool for tool in prompt.tools}
        is_forced = prompt.tool_choice.use is ToolUse.REQUIRED
        return AnswerPlan(
            reasoning=reasoning,
            is_open=is_open,
            calls=calls,
            is_forced=is_forced,
            tools=tools,
            shown_ids=self.shown_ids,
        )


PLAIN = AnswerFormat()
"""Format of answers without reasoning and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Plan for splitting the answers to one prompt into channels."""

    reasoning: Reasoning | None
    """None: answers have no reasoning."""
    is_open: bool
    """Whether answers start inside a reasoning; else they may start with one."""
    calls: CallForm | None
    """None: answers have no calls."""
    is_forced: bool
    """Whether answers consist of calls."""
    tools: Mapping[str, Tool]
    """Tools that answers may call, by name."""
    shown_ids: frozenset[int]

    def channels(self, request_id: str, choice_index: int) -> Channels:
        """Return the channels of one answer."""
        reasoning = ReasoningReader(self.reasoning, is_open=self.is_open) if self.reasoning else None
        calls = None
        if self.calls is not None:
            ids = CallIds(request_id, choice_index, self.calls.num_id_letters)
            calls = Calls(self.calls, self.tools, ids, is_forced=self.is_forced)
        return Channels(reasoning, calls, self.shown_ids)


def with_reasoning(params: SamplingParams, plan: AnswerPlan | None) -> SamplingParams:
    """Return the parameters with the tokens that start and end the reasoning.

    They are set if a structure or a thinking budget needs them, and the client does not set them.

    Raises:
        InvalidRequest: there is a thinking budget, but no known end of a reasoning.
    """
    if not params.is_structured or params.reasoning_end_ids:
        return params
    reasoning = plan.reasoning if plan else None
    if plan and reasoning and reasoning.end_ids and (plan.is_open or reasoning.begin_id is not None):
        begin_id = None if plan.is_open else reasoning.begin_id
        return replace(params, reasoning_begin_id=begin_id, reasoning_end_ids=reasoning.end_ids)
    if params.thinking_budget is not None:
        raise InvalidRequest(
            "thinking_budget needs a reasoning, but none is known for answers to this prompt; unset it, or set "
            "reasoning_end_ids to the tokens that end the reasoning",
            "thinking_budget",
        )
    return params


def _fields_of(template: Any) -> Mapping[str, Any] | None:
    """Return the fields of a response template; None: the model has no template."""
    if template is None:
        return None
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ModelLoadError("the model's response_template must be an object with fields")
    return fields


def _marks_of(fields: Mapping[str, Any]) -> tuple[Mark, Mark] | None:
    field = next((fields[name] for name in REASONING_NAMES if name in fields), None)
    if field is None:
        return None
    if not isinstance(field, Mapping):
        raise ModelLoadError("the model's response_template has a field that is not an object")
    return Mark.of(field, "open"), Mark.of(field, "close")


def _known_marks(chat_template: str) -> tuple[Mark, Mark] | None:
    for begin, end in KNOWN_MARKS:
        if begin in chat_template or end in chat_template:
            return Mark.of({"open": begin}, "open"), Mark.of({"close": end}, "close")
    return None


def _place_of(
    reasoning: Reasoning | None, chat: Chat, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[bool, bool]:
    """Return whether answers start inside a reasoning, and whether they may start with one."""
    if reasoning is None:
        return False, False
    if chat.continue_final_message:
        return reasoning.is_open_in(chat.messages[-1].content), False
    tail = tokenizer.decode_all(prompt_ids[-MAX_TAIL:]).rstrip() if chat.add_generation_prompt else ""
    return reasoning.opens.ends(tail), chat.add_generation_prompt and not reasoning.closes.ends(tail)
