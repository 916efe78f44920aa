"""How a model marks the parts of its answers that are no content, by its folder's word or its chat template's.

A folder may have a `response_template` in its tokenizer_config.json, in the form of transformers 5
(utils/chat_parsing/response_templates.py): it wins. Else the marks that the chat template has are looked for among
those that models are known to use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from baton.api import Chat, PromptInput
from baton.errors import InvalidRequest, ModelLoadError
from baton.model_files import read_json
from baton.sampling import SamplingParams
from router.answer.channels import Channels
from router.answer.marks import Mark, Reasoning

if TYPE_CHECKING:
    from router.prompt.tokenizer import Tokenizer

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


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks the parts of its answers to chats."""

    reasoning: Reasoning | None = None
    """None: the model does not reason, or does not mark it."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that marks are made of."""

    @staticmethod
    def load(tokenizer: Tokenizer) -> AnswerFormat:
        """Reads the format of a model.

        Raises:
            ModelLoadError: its `response_template` is not valid.
        """
        config = read_json(tokenizer.folder / "tokenizer_config.json")
        marks = _marks_of(config.get("response_template"), tokenizer.chat_template.source)
        if marks is None:
            return PLAIN
        opens, closes = marks
        begin, end = (tuple(tokenizer.encode_fragment(mark.text)) if mark.text else () for mark in marks)
        special = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_ids}
        return AnswerFormat(
            reasoning=Reasoning(opens, closes, begin[0] if len(begin) == 1 else None, end),
            shown_ids=frozenset(i for i, text in special.items() if opens.names(text) or closes.names(text)),
        )

    def plan(self, prompt: PromptInput, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> AnswerPlan | None:
        """Returns where the text of answers to a prompt goes; None: all of it is content, as all that follows a text.

        Args:
            prompt_ids: the tokens of the prompt.
        """
        if self.reasoning is None or not isinstance(prompt, Chat):
            return None
        if prompt.continue_final_message:
            is_open = self.reasoning.is_open_in(prompt.messages[-1].content)
            may_begin = False
        else:
            tail = tokenizer.decode_all(prompt_ids[-MAX_TAIL:]).rstrip() if prompt.add_generation_prompt else ""
            is_open = self.reasoning.opens.ends(tail)
            may_begin = prompt.add_generation_prompt and not self.reasoning.closes.ends(tail)
        return AnswerPlan(self.reasoning, self.shown_ids, is_open) if is_open or may_begin else None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Where the text of answers to one prompt goes."""

    reasoning: Reasoning
    shown_ids: frozenset[int]
    is_open: bool
    """Whether answers begin inside of a reasoning, or may begin with one."""

    def channels(self) -> Channels:
        """Returns the channels of one answer."""
        return Channels(self.reasoning, self.shown_ids, is_open=self.is_open)


def with_reasoning(params: SamplingParams, plan: AnswerPlan | None) -> SamplingParams:
    """Returns the parameters with the tokens that begin and end the reasoning, where a structure or a budget needs
    them and the client names none.

    Raises:
        InvalidRequest: there is a budget, and no reasoning that is known to end.
    """
    if not params.is_structured or params.reasoning_end_ids:
        return params
    if plan is not None and plan.reasoning.end_ids and (plan.is_open or plan.reasoning.begin_id is not None):
        begin_id = None if plan.is_open else plan.reasoning.begin_id
        return replace(params, reasoning_begin_id=begin_id, reasoning_end_ids=plan.reasoning.end_ids)
    if params.thinking_budget is not None:
        raise InvalidRequest(
            "thinking_budget limits a reasoning, but answers to this prompt are not known to have one; unset it, or "
            "name the tokens that end the reasoning in reasoning_end_ids",
            "thinking_budget",
        )
    return params


PLAIN = AnswerFormat()
"""Answers that are all content."""


def _marks_of(template: Any, chat_template: str) -> tuple[Mark, Mark] | None:
    if template is not None:
        fields = template.get("fields") if isinstance(template, Mapping) else None
        if not isinstance(fields, Mapping):
            raise ModelLoadError("The model's response_template must be an object with fields.")
        field = next((fields[name] for name in REASONING_NAMES if name in fields), None)
        if field is None:
            return None
        if not isinstance(field, Mapping):
            raise ModelLoadError("The model's response_template has a field that is no object.")
        return Mark.of(field, "open"), Mark.of(field, "close")
    for begin, end in KNOWN_MARKS:
        if begin in chat_template or end in chat_template:
            return Mark.of({"open": begin}, "open"), Mark.of({"close": end}, "close")
    return None
