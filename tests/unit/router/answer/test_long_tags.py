"""Arguments in tags may be long, and full of what could end them: that costs no more than their length, at any cut."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from baton.tools import Tool
from router.answer import CallForm, CallIds, Calls
from router.answer.call_format import QWEN_XML
from router.answer.tag_calls import SEARCHED_AT_ONCE

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}, "more": {"type": "object"}}}
TOOLS = {"run": Tool(name="run", parameters=PARAMETERS)}
LOOSE = QWEN_XML.loose or QWEN_XML
MENTIONS = ("</function>", "</function>x</tool_call>", "</tool_call>", "<parameter=a", "\n<parameter=zz>")


def read(form: CallForm, text: str, size: int) -> Iterator[tuple[int, str, str]]:
    """How much has come, and the arguments and the content that have been given out by then, with each piece."""
    calls, given, content = Calls(form, TOOLS, CallIds("r", 0, form.num_id_letters)), "", ""
    for at in [*range(0, len(text), size), len(text)]:
        found = calls.push(text[at : at + size]) if at < len(text) else calls.flush(is_whole=True)
        given += "".join(each.arguments for each in found.calls)
        content += found.text
        yield min(at + size, len(text)) if at < len(text) else len(text) + 1, given, content


def answer(code: str, more: str = '{"a": 1}') -> str:
    argument = f"<parameter=code>\n{code}\n</parameter>\n<parameter=more>\n{more}\n</parameter>"
    return f"<tool_call>\n<function=run>\n{argument}\n</function>\n</tool_call>"


@pytest.mark.parametrize("form", [QWEN_XML, LOOSE], ids=["strict", "loose"])
@pytest.mark.parametrize("mention", ["</function>", "</tool_call>", "x"])
def test_what_is_given_out_depends_on_the_text_and_not_on_its_pieces(form: CallForm, mention: str) -> None:
    for length in (SEARCHED_AT_ONCE - 80, SEARCHED_AT_ONCE, 3 * SEARCHED_AT_ONCE):
        code = f"{mention} = 1; " * (length // len(f"{mention} = 1; "))
        text = answer(code.strip())
        by_letter = {num: (given, content) for num, given, content in read(form, text, 1)}
        for size in (3, 64, 1000, len(text)):
            for num, given, content in read(form, text, size):
                assert (given, content) == by_letter[num], (length, size, num)
        given, content = by_letter[len(text) + 1]
        assert (json.loads(given), content) == ({"code": code.strip(), "more": {"a": 1}}, "")


@pytest.mark.parametrize("form", [QWEN_XML, LOOSE], ids=["strict", "loose"])
@pytest.mark.parametrize("mention", [*MENTIONS, "</parameter>"])
def test_an_answer_full_of_what_could_end_an_argument_costs_as_its_length(form: CallForm, mention: str) -> None:
    """It was searched from its begin for each of them, on the router's event loop: for ten seconds to a minute."""
    argument, begin = ("more", '{"a": "') if mention == "</parameter>" else ("code", "")
    text = f"<tool_call>\n<function=run>\n<parameter={argument}>\n{begin}{mention * (48_000 // len(mention))}"
    before_s = time.process_time()
    for _ in read(form, text, 4):
        pass
    assert time.process_time() - before_s < 5
