"""How a model marks the parts of its answers that are no content, by its folder's word or its chat template's.

A folder may have a `response_template` in its tokenizer_config.json, in the form of transformers 5
(utils/chat_parsing/response_templates.py): it wins. Else the marks that the chat template has are looked for among
those that models are known to use.
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
"""What response templates call the reasoning."""
KNOWN_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Marks around a reasoning: DeepSeek's, Qwen's and most others'; Mistral's; Seed's; Cohere's; Gemma's."""
MAX_TAIL = 64
"""Tokens at the end of a prompt that are looked at: what a template writes behind the last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How a model marks the parts of its answers to chats."""

    reasoning: Reasoning | None = None
    """None: the model does not reason, or does not mark it."""
    calls: CallForm | None = None
    """None: its calls of tools cannot be read."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that marks are made of."""

    @staticmethod
    def load(tokenizer: Tokenizer) -> AnswerFormat:
        """Reads the format of a model. What of its `response_template` is not known is a warning.

        Raises:
            ModelLoadError: its `response_template` is not valid.
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
                logger.warning("%s writes calls of tools in a way that is not known: they are text", tokenizer.folder)
        else:
            calls = known_form(template.source_with_tools)
        all_marks += calls.marks if calls else ()
        special = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_ids}
        shown_ids = frozenset(i for i, text in special.items() if any(mark.names(text) for mark in all_marks))
        return AnswerFormat(reasoning=reasoning, calls=calls, shown_ids=shown_ids)

    def plan(
        self, prompt: PromptInput, prompt_ids: Sequence[int], tokenizer: Tokenizer, params: SamplingParams
    ) -> AnswerPlan | None:
        """Returns where the text of answers to a prompt goes; None: all of it is content, as all that follows a text.

        Args:
            prompt_ids: the tokens of the prompt.
            params: the client's. Content with a structure may have marks in its texts: calls stand at its begin, or
                nowhere.
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
"""Answers that are all content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Where the text of answers to one prompt goes."""

    reasoning: Reasoning | None
    """None: answers have none."""
    is_open: bool
    """Whether answers begin inside of a reasoning, or may begin with one."""
    calls: CallForm | None
    """None: answers have none."""
    is_forced: bool
    """Whether answers consist of calls."""
    tools: Mapping[str, Tool]
    """What answers may call, by name."""
    shown_ids: frozenset[int]

    def channels(self, request_id: str, choice_index: int) -> Channels:
        """Returns the channels of one answer."""
        reasoning = ReasoningReader(self.reasoning, is_open=self.is_open) if self.reasoning else None
        calls = None
        if self.calls is not None:
            ids = CallIds(request_id, choice_index, self.calls.num_id_letters)
            calls = Calls(self.calls, self.tools, ids, is_forced=self.is_forced)
        return Channels(reasoning, calls, self.shown_ids)


def with_reasoning(params: SamplingParams, plan: AnswerPlan | None) -> SamplingParams:
    """Returns the parameters with the tokens that begin and end the reasoning, where a structure or a budget needs
    them and the client names none.

    Raises:
        InvalidRequest: there is a budget, and no reasoning that is known to end.
    """
    if not params.is_structured or params.reasoning_end_ids:
        return params
    reasoning = plan.reasoning if plan else None
    if plan and reasoning and reasoning.end_ids and (plan.is_open or reasoning.begin_id is not None):
        begin_id = None if plan.is_open else reasoning.begin_id
        return replace(params, reasoning_begin_id=begin_id, reasoning_end_ids=reasoning.end_ids)
    if params.thinking_budget is not None:
        raise InvalidRequest(
            "thinking_budget limits a reasoning, but answers to this prompt are not known to have one; unset it, or "
            "name the tokens that end the reasoning in reasoning_end_ids",
            "thinking_budget",
        )
    return params


def _fields_of(template: Any) -> Mapping[str, Any] | None:
    """Returns the fields of a response template; None: the model has none."""
    if template is None:
        return None
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ModelLoadError("The model's response_template must be an object with fields.")
    return fields


def _marks_of(fields: Mapping[str, Any]) -> tuple[Mark, Mark] | None:
    field = next((fields[name] for name in REASONING_NAMES if name in fields), None)
    if field is None:
        return None
    if not isinstance(field, Mapping):
        raise ModelLoadError("The model's response_template has a field that is no object.")
    return Mark.of(field, "open"), Mark.of(field, "close")


def _known_marks(chat_template: str) -> tuple[Mark, Mark] | None:
    for begin, end in KNOWN_MARKS:
        if begin in chat_template or end in chat_template:
            return Mark.of({"open": begin}, "open"), Mark.of({"close": end}, "close")
    return None


def _place_of(
    reasoning: Reasoning | None, chat: Chat, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[bool, bool]:
    """Returns whether answers begin inside of a reasoning, and whether they may begin with one."""
    if reasoning is None:
        return False, False
    if chat.continue_final_message:
        return reasoning.is_open_in(chat.messages[-1].content), False
    tail = tokenizer.decode_all(prompt_ids[-MAX_TAIL:]).rstrip() if chat.add_generation_prompt else ""
    return reasoning.opens.ends(tail), chat.add_generation_prompt and not reasoning.closes.ends(tail)
