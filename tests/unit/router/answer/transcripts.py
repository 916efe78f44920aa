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


def seeds(name: str, *values: tuple[str, str]) -> str:
    tags = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values)
    return f"<seed:tool_call>\n<function={name}>\n{tags}</function>\n</seed:tool_call>"


def actions(*calls: tuple[str, str]) -> str:
    parts = (
        f'    {{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {arguments}}}'
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{', '.join(parts)}\n]<|END_ACTION|>"


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
        '<tool_call>\n{"name": "weather", "arguments": {"a": 1\n</tool_call>x', "x", (("weather", '{"a": 1\n}'),)
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
               calls=(("weather", '{"city": "Paris"'),)),
    Transcript("<tool_call>\n<function=add>\n</function>\n</tool_call> Done", "Done", (("add", "{}"),)),
    Transcript("<tool_call>\n<function=add>\noh\n</function>\n</tool_call>", "oh", (("add", "{}"),)),
    Transcript("<tool_call>\n<function=wea", "<tool_call>\n<function=wea"),
    Transcript("Look: " + tagged("typed", ("list", DEEP)) + " There.", "Look:  There.",
               (("typed", f'{{"list": {DEEP}}}'),)),
    Transcript(tagged("unknown"), tagged("unknown")),
    Transcript("<tool_call> only a mark", "<tool_call> only a mark"),
]  # fmt: skip
_BARE = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
QWEN_XML_BARE = [
    Transcript(f"I will look it up.\n\n{_BARE}\n</tool_call>", "I will look it up.", ONE),
    Transcript(f"{_BARE}\n</tool_call>\nSo.", "So.", ONE),
    Transcript(f"I look.\n{_BARE}", "I look.", ONE),
    Transcript(f"{_BARE}\n<function=add>\n</function>", "", TWO),
    Transcript(f"{_BARE}\n</tool_call>\n{tagged('add')}", "", TWO),
    Transcript(f"<tool_call>\n{_BARE} Done.", "Done.", ONE),
    Transcript(
        "<function=weather><parameter=city>a </function> b</parameter></function>",
        calls=(("weather", '{"city": "a </function> b"}'),),
    ),
    Transcript("Write <function=weather> first.", "Write <function=weather> first."),
    Transcript("Write <function=weather>\n", "Write <function=weather>\n"),
    Transcript("<function=unknown>\n</function>", "<function=unknown>\n</function>"),
]
"""The mark before a call, or the one behind it, is left out."""
_SEED = "<function=weather>\n<parameter=city>Paris</parameter>\n</function>"
SEED_XML = [
    Transcript(seeds("weather", ("city", "Paris")), calls=ONE),
    Transcript(f"I look.\n{seeds('weather', ('city', 'Paris'))}\n{seeds('add')} So.", "I look.\n\n So.", TWO),
    Transcript(f"I look.\n{_SEED}\n</seed:tool_call>", "I look.", ONE),
    Transcript(seeds("typed", ("n", "7"), ("list", DEEP)), calls=(("typed", f'{{"n": 7, "list": {DEEP}}}'),)),
    Transcript(seeds("weather", ("city", "Köln 🐈")), calls=(("weather", '{"city": "Köln 🐈"}'),)),
    Transcript("<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=x>P",
               calls=(("weather", '{"city": "Paris"'),)),
    Transcript(seeds("unknown"), seeds("unknown")),
    Transcript("<seed:tool_call> only a mark", "<seed:tool_call> only a mark"),
    Transcript("<seed:tool_call>\n<function=wea", "<seed:tool_call>\n<function=wea"),
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
_NAMED = [
    Transcript(f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]add[ARGS]{{}}", calls=TWO),
    Transcript(f"[TOOL_CALLS]weather{WEATHER} So.", "So.", ONE),
    Transcript(f"[TOOL_CALLS]weather {NESTED}", calls=(("weather", NESTED),)),
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
COHERE = [
    Transcript(actions(*ONE), calls=ONE),
    Transcript(actions(*TWO), calls=TWO),
    Transcript(f"I look.\n{actions(('weather', NESTED))}", "I look.", (("weather", NESTED),)),
    Transcript(actions(("weather", UNICODE)), calls=(("weather", UNICODE),)),
    Transcript(f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {WEATHER}}}]<|END_ACTION|>', calls=ONE),
    Transcript(f"One. {actions(*ONE)} Done.", "One.  Done.", ONE),
    Transcript(actions(*ONE).partition("}")[0], calls=(("weather", WEATHER[:-1]),)),
    Transcript(actions(("unknown", "{}")), actions(("unknown", "{}"))),
    Transcript("<|START_ACTION|>none", "<|START_ACTION|>none"),
]


def fenced_actions(*calls: tuple[str, str]) -> str:
    return f"Action: ```json\n{actions(*calls).removeprefix('<|START_ACTION|>').removesuffix('<|END_ACTION|>')}\n```"


COHERE_FENCED = [
    Transcript(fenced_actions(*ONE), calls=ONE),
    Transcript(fenced_actions(*TWO), calls=TWO),
    Transcript(f"I look.\n{fenced_actions(('weather', NESTED))}", "I look.", (("weather", NESTED),)),
    Transcript(fenced_actions(("weather", UNICODE)), calls=(("weather", UNICODE),)),
    Transcript(f"One. {fenced_actions(*ONE)} Done.", "One.  Done.", ONE),
    Transcript(fenced_actions(*ONE).partition("}")[0], calls=(("weather", WEATHER[:-1]),)),
    Transcript("Action: none", "Action: none"),
    Transcript(fenced_actions(("directly_answer", "{}")), fenced_actions(("directly_answer", "{}"))),
]
NEMOTRON = [
    Transcript(f"<TOOLCALL>{listed(*ONE)}</TOOLCALL>", calls=ONE),
    Transcript(f"I look. <TOOLCALL>{listed(*TWO)}</TOOLCALL>", "I look.", TWO),
    Transcript(f"<TOOLCALL>{listed(('weather', NESTED))}</TOOLCALL>", calls=(("weather", NESTED),)),
    Transcript(f"<TOOLCALL>{listed(('weather', UNICODE))}</TOOLCALL>", calls=(("weather", UNICODE),)),
    Transcript(f"One. <TOOLCALL>{listed(*ONE)}</TOOLCALL> Done.", "One.  Done.", ONE),
    Transcript(f"<TOOLCALL>{listed(*ONE)[:-3]}", calls=(("weather", WEATHER[:-1]),)),
    Transcript("<TOOLCALL>none", "<TOOLCALL>none"),
]
PHI = [
    Transcript(f"functools{listed(*ONE)}", calls=ONE),
    Transcript(f"functools {listed(*TWO)}", calls=TWO),
    Transcript(f"<|tool_call|>{listed(*TWO)}<|/tool_call|>", calls=TWO),
    Transcript(f"I look. functools{listed(('weather', NESTED))}", "I look.", (("weather", NESTED),)),
    Transcript(f"functools{listed(('weather', UNICODE))}\n", calls=(("weather", UNICODE),)),
    Transcript(f"One. functools{listed(*ONE)} Done.", "One.  Done.", ONE),
    Transcript(f"functools{listed(*ONE)[:-3]}", calls=(("weather", WEATHER[:-1]),)),
    Transcript("functools are Python's", "functools are Python's"),
    Transcript("functools[0] and functools", "functools[0] and functools"),
    Transcript('functools[{"name": "unknown", "arguments": {}}]', 'functools[{"name": "unknown", "arguments": {}}]'),
]
GLM = [
    Transcript(f"weather\n{WEATHER}", calls=ONE),
    Transcript(f"\nweather\n{WEATHER}\nadd\n{{}}", calls=TWO),
    Transcript(f"weather \n {NESTED}", calls=(("weather", NESTED),)),
    Transcript(f"weather\n{UNICODE}\n", calls=(("weather", UNICODE),)),
    Transcript(f"weather\n{WEATHER} So.", "So.", ONE),
    Transcript('weather\n{"city": "Pa', calls=(("weather", '{"city": "Pa'),)),
    Transcript("weather\nis bad", "weather\nis bad"),
    Transcript("weather", "weather"),
    Transcript("The weather\n{}", "The weather\n{}"),
    Transcript("unknown\n{}", "unknown\n{}"),
    Transcript("a\nadd\n{}", "a\nadd\n{}"),
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
        (call_format.QWEN_XML, [*QWEN_XML, *QWEN_XML_BARE, *QWEN_XML_MARKS]),
        (call_format.SEED_XML, SEED_XML),
        (call_format.MISTRAL, [*MISTRAL, *_NAMED]),
        (call_format.MISTRAL_11, [*MISTRAL_11, *_NAMED, *MISTRAL]),
        (call_format.COHERE, COHERE),
        (call_format.COHERE_FENCED, COHERE_FENCED),
        (call_format.NEMOTRON, NEMOTRON),
        (call_format.PHI, PHI),
        (call_format.GLM, GLM),
        (call_format.DEEPSEEK, DEEPSEEK),
        (call_format.GRANITE, GRANITE),
        (call_format.PLAIN_JSON, PLAIN_JSON),
    )
    for transcript in transcripts
]
