"""What templates make of chats, without the process in which a router has them rendered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from baton.api import Chat
from baton.template import Templates
from router.prompt import ChatTemplate, Tokenizer
from router.prompt.chat import until_continued


@cache
def _templates(setup: bytes) -> Templates:
    return Templates(*json.loads(setup))


def written(template: ChatTemplate, question: bytes) -> str:
    """What the template makes of a question."""
    return _templates(template.setup).render(*json.loads(question))


def rendered(template: ChatTemplate, context: Mapping[str, Any], *, continues: bool = False) -> str:
    """What the template makes of what it gets from a client."""
    text = written(template, template.question(context))
    return until_continued(text) if continues else text


def encoded(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """A chat's tokens."""
    draft = tokenizer.draft_chat(chat)
    text = written(tokenizer.chat_template, draft.question)
    text = until_continued(text) if chat.continue_final_message else text
    return tokenizer.encode_written(text, mark=draft.mark, scope="")
