"""Answers with calls as models of each family write them, broken ones too, and what is in them."""

from __future__ import annotations

from dataclasses import dataclass

from router.answer import CallForm, call_format

WEATHER = '{"city": "Paris"}'
NESTED = '{"query": {"any": ["a {b}", "c\\"]}"], "n": 1.5e3}, "deep": [[{}]], "no": null}'
LONG = "x" * 40
DEEP = '[[1, {}], {"a": {"b": []}}]'
UNICODE = '{"city": "Köln 🐈", "note": "a\\u0301 </tool_call> [TOOL_CALLS]"}'


@dataclass(frozen=True, slots=True)
class Transcript:
    """An answer, and what its channels get."""

    raw: str
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each."""


ONE = (("weather", WEATHER),)
TWO = (("weather", WEATHER), ("add", "{}"))


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    )


def listed(*calls: tuple[str, str]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"


def fenced(*calls: tuple[str, str]) -> str:
    parts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"


def tagged(name: str, *values: tuple[str, str]) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


HERMES = [
    Transcript(hermes(*ONE), calls=ONE),
    Transcript(f"Let me see.\n\n{hermes(*TWO)}", "Let me see.", TWO),
    Transcript(hermes(("weather", NESTED)), calls=(("weather", NESTED),)),
    Transcript(hermes(("weather", UNICODE)) + "\n", calls=(("weather", UNICODE),)),
    Transcript(f"One: {hermes(*ONE)}\nDone, I think. ", "One: \nDone, I think. ", ONE),
    Transcript(f'<tool_call>{{"arguments":{WEATHER},"name":"weather"}}</tool_call>', calls=ONE),
    Transcript('<tool_call>\n{"name": "add"}\n</tool_call>', calls=(("add", "{}"),)),
    Transcript(
        '<tool_call>{"id": 7, "x": [1, "}"], "name": "add", "arguments": {}}</tool_call>', calls=(("add", "{}"),)
    ),
    Transcript('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', calls=(("weather", '{"city": "Pa'),)),
    Transcript(
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1\n</tool_call>x', "x", (("weather", '{"a": 1\n'),)
    ),
    Transcript(f"\n{hermes(*ONE)}\nDone", "Done", ONE),
    Transcript(
        '<tool_call>{"name": "add", "arguments": {}, "parameters": {"a": 1}, "name": "x"}</tool_call>',
        "",
        (("add", "{}"),),
    ),
    Transcript("no call <tool_call", "no call <tool_call"),
    Transcript('<tool_call>\n{"name": "weath', '<tool_call>\n{"name": "weath'),
    Transcript("<tool_call>\nweather(Paris)\n</tool_call>", "<tool_call>\nweather(Paris)\n</tool_call>"),
    Transcript(hermes(("unknown", "{}")), hermes(("unknown", "{}"))),
    Transcript(
        '<tool_call>{"arguments": "{}", "name": "add"}</tool_call>',
        '<tool_call>{"arguments": "{}", "name": "add"}</tool_call>',
    ),
    Transcript('<tool_call>{"arguments": null, "name": "add"}</tool_call>', calls=(("add", "{}"),)),
    Transcript('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>'),
    Transcript(f"<tool_call>[{hermes(*ONE)}", "<tool_call>[", ONE),
    Transcript("plain text, {} and [] \n", "plain text, {} and [] \n"),
    Transcript(" ", " "),
]
QWEN_XML = [
    Transcript(tagged("weather", ("city", "Paris")), calls=ONE),
    Transcript(f"Let me see.\n{tagged('weather', ('city', 'Paris'))}\n{tagged('add')}", "Let me see.", TWO),
    Transcript(tagged("typed", ("n", "7"), ("on", "true"), ("list", "[1, 2]")),
               calls=(("typed", '{"n": 7, "on": true, "list": [1, 2]}'),)),
    Transcript(tagged("typed", ("n", "seven"), ("text", "7"), ("none", "null"), ("x", "1.50"), ("big", "9" * 5000)),
               calls=(("typed", '{"n": "seven", "text": "7", "none": null, "x": 1.50, "big": "' + "9" * 5000 + '"}'),)),
    Transcript(tagged("weather", ("city", "a\n  <b> 🐈\n")), calls=(("weather", '{"city": "a\\n  <b> 🐈\\n"}'),)),
    Transcript("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=x>\nPa",
               "<parameter=x>\nPa", (("weather", '{"city": "Paris"'),)),
    Transcript("<tool_call>\n<function=add>\n</function>\n</tool_call> Done", "Done", (("add", "{}"),)),
    Transcript("<tool_call>\n<function=add>\noh\n</function>\n</tool_call>", "oh", (("add", "{}"),)),
    Transcript("<tool_call>\n<function=wea", "<tool_call>\n<function=wea"),
    Transcript("Look: " + tagged("typed", ("list", DEEP)) + " There.", "Look:  There.",
               (("typed", f'{{"list": {DEEP}}}'),)),
    Transcript(tagged("unknown"), tagged("unknown")),
    Transcript("<tool_call> only a mark", "<tool_call> only a mark"),
]  # fmt: skip
QWEN_XML_MARKS = [
    Transcript(tagged("typed", ("list", '["</parameter>", "</function></tool_call>", "\\"<parameter=n>"]'), ("n", "7")),
               calls=(("typed", '{"list": ["</parameter>", "</function></tool_call>", "\\"<parameter=n>"], "n": 7}'),)),
    Transcript(tagged("typed", ("list", '[\n"</parameter> '), ("n", "7")) + " So.",
               "</parameter> So.", (("typed", '{"list": "[\\n\\"", "n": 7}'),)),
    Transcript('<tool_call>\n<function=typed>\n<parameter=list>["</parameter>"]</parameter>\n</function>\n</tool_call>',
               calls=(("typed", '{"list": ["</parameter>"]}'),)),
    Transcript(tagged("typed", ("list", '["</parameter>"]'), ("more", f'{{"a": "{LONG}</parameter>"}}')),
               calls=(("typed", '{"list": ["</parameter>"], "more": {"a": "' + LONG + '</parameter>"}}'),)),
    Transcript(tagged("typed", ("list", '["a</parameter>" oh]')), '" oh]\n</parameter>',
               (("typed", '{"list": "[\\"a"}'),)),
    Transcript('<tool_call>\n<function=typed>\n<parameter=list>\n["</parameter>"', '"',
               (("typed", '{"list": "[\\""'),)),
    Transcript(tagged("weather", ("city", '["a</parameter>b"]')), 'b"]\n</parameter>',
               (("weather", '{"city": "[\\"a"}'),)),
]  # fmt: skip
"""Marks in the strings of arguments: in JSON they are none. The library takes them for marks."""
MISTRAL = [
    Transcript(f"[TOOL_CALLS]{listed(*ONE)}", calls=ONE),
    Transcript(f"[TOOL_CALLS] {listed(*TWO)}", calls=TWO),
    Transcript(f"I look. [TOOL_CALLS]{listed(('weather', NESTED))}", "I look.", (("weather", NESTED),)),
    Transcript(
        f"[TOOL_CALLS]{listed(('weather', UNICODE), ('add', '{}'))}", calls=(("weather", UNICODE), ("add", "{}"))
    ),
    Transcript(f"One. [TOOL_CALLS]{listed(*ONE)} Done.", "One.  Done.", ONE),
    Transcript(f"[TOOL_CALLS]{listed(*ONE)[:-1]}, {{oh", ", {oh", ONE),
    Transcript(f"[TOOL_CALLS]{listed(*ONE)[:-1]}", "", ONE),
    Transcript('[TOOL_CALLS][{"name": "weather", "arguments": {"city"', calls=(("weather", '{"city"'),)),
    Transcript("[TOOL_CALLS]oh", "[TOOL_CALLS]oh"),
    Transcript("[TOOL_CALLS][]", "[TOOL_CALLS][]"),
]
MISTRAL_11 = [
    Transcript(f"[TOOL_CALLS]weather[ARGS]{WEATHER}", calls=ONE),
    Transcript(f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]add[ARGS]{{}}", calls=TWO),
    Transcript(f"Well, [TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{NESTED}", "Well,", (("weather", NESTED),)),
    Transcript(f"[TOOL_CALLS]weather[ARGS] {UNICODE}", calls=(("weather", UNICODE),)),
    Transcript('[TOOL_CALLS]weather[ARGS]{"city": ', calls=(("weather", '{"city": '),)),
    Transcript(f"One. [TOOL_CALLS]weather[ARGS]{WEATHER} Done.", "One.  Done.", ONE),
    Transcript("[TOOL_CALLS]weather", "[TOOL_CALLS]weather"),
    Transcript("[TOOL_CALLS]weather[ARGS]oh", "[TOOL_CALLS]weather[ARGS]oh"),
    Transcript("[TOOL_CALLS]unknown[ARGS]{}", "[TOOL_CALLS]unknown[ARGS]{}"),
]
DEEPSEEK = [
    Transcript(fenced(*ONE), calls=ONE),
    Transcript(f"Well.\n{fenced(*TWO)}", "Well.", TWO),
    Transcript(fenced(("weather", NESTED)), calls=(("weather", NESTED),)),
    Transcript(fenced(("weather", UNICODE)), calls=(("weather", UNICODE),)),
    Transcript("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
               f"{WEATHER}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
               calls=TWO),
    Transcript(fenced(*ONE).partition('"city"')[0], calls=(("weather", "{"),)),
    Transcript(f"One. {fenced(*ONE)} Done.", "One.  Done.", ONE),
    Transcript("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\noh",
               "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\noh"),
    Transcript("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>"),
    Transcript("<｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}", "<｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}"),
]  # fmt: skip
GRANITE = [
    Transcript(f"<|tool_call|>{listed(*ONE)}", calls=ONE),
    Transcript(f"<|tool_call|>\n{listed(*TWO)}\n", calls=TWO),
    Transcript(f"<|tool_call|>{listed(('weather', NESTED))} So.", "So.", (("weather", NESTED),)),
    Transcript(f"<|tool_call|>{listed(('weather', UNICODE))}", calls=(("weather", UNICODE),)),
    Transcript(f"Yes. <|tool_call|>{listed(('add', '{}'))}", "Yes.", (("add", "{}"),)),
    Transcript(f"One. <|tool_call|>{listed(*ONE)} Done.", "One.  Done.", ONE),
    Transcript('<|tool_call|>[{"name": "weather", "arguments": {"city": "Pa', calls=(("weather", '{"city": "Pa'),)),
    Transcript("<|tool_call|>none", "<|tool_call|>none"),
]
PLAIN_JSON = [
    Transcript(f'{{"name": "weather", "parameters": {WEATHER}}}', calls=ONE),
    Transcript(f'<|python_tag|>{{"name": "weather", "parameters": {WEATHER}}}', calls=ONE),
    Transcript(f'{{"name": "weather", "parameters": {WEATHER}}}; {{"name": "add", "parameters": {{}}}}', calls=TWO),
    Transcript(f'\n {{"type": "function", "name": "weather", "arguments": {NESTED}}}', calls=(("weather", NESTED),)),
    Transcript(listed(("weather", UNICODE), ("add", "{}")), calls=(("weather", UNICODE), ("add", "{}"))),
    Transcript(f'{{"name": "weather", "parameters": {WEATHER}}} So.', "So.", ONE),
    Transcript('{"name": "weather", "parameters": {"city": "Pa', calls=(("weather", '{"city": "Pa'),)),
    Transcript('{"name": "weather"}', '{"name": "weather"}'),
    Transcript('{"answer": 42}', '{"answer": 42}'),
    Transcript("[1, 2] and ", "[1, 2] and "),
    Transcript('I say {"name": "weather", "parameters": {}}', 'I say {"name": "weather", "parameters": {}}'),
    Transcript('{"name": "unknown", "parameters": {}} \n', '{"name": "unknown", "parameters": {}} \n'),
    Transcript('; {"name": "add", "parameters": {}}', '; {"name": "add", "parameters": {}}'),
    Transcript("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
]
TRANSCRIPTS: list[tuple[CallForm, Transcript]] = [
    (form, transcript)
    for form, transcripts in (
        (call_format.HERMES, HERMES),
        (call_format.QWEN_XML, [*QWEN_XML, *QWEN_XML_MARKS]),
        (call_format.MISTRAL, MISTRAL),
        (call_format.MISTRAL_11, MISTRAL_11),
        (call_format.DEEPSEEK, DEEPSEEK),
        (call_format.GRANITE, GRANITE),
        (call_format.PLAIN_JSON, PLAIN_JSON),
    )
    for transcript in transcripts
]
