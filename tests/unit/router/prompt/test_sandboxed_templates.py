"""A model's chat template is a program that nobody has checked: it has no more than a second and some memory."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2.meta
import psutil
import pytest

from baton.api import Chat
from baton.chat import ChatMessage
from baton.errors import InvalidRequest, ModelLoadError
from baton.sampling import SamplingParams
from baton.tasks import cancel_and_wait
from baton.template import Variables, environment_of_templates
from router.admission import ModelFacts
from router.admission.tenants import Tenant
from router.prompt import ChatTemplate, PromptEncoder, Tokenizer, sandboxes
from tests.support.cases import chosen
from tests.support.waiting import until

FACTS = ModelFacts(id="m", vocab_size=49152, max_model_len=2**20, default_sampling=SamplingParams())
A, B = Tenant(id="a"), Tenant(id="b")
FAMILIES = sorted((Path(__file__).parent / "families").rglob("*.jinja"))


@pytest.fixture
def encoder_of(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the encoder of the default model with another template."""
    for name in ("WAIT_S", "ANSWER_S"):
        monkeypatch.setattr(sandboxes, name, 100.0)  # however busy the machine is
    made: list[PromptEncoder] = []

    def make(source: str) -> PromptEncoder:
        for path in model_dir.iterdir():
            if path.suffix == ".json":
                (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "chat_template.jinja").write_text(source)
        made.append(PromptEncoder(Tokenizer.load(tmp_path)))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert renderers() == []


def renderers() -> list[psutil.Process]:
    found = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in found if "baton.template" in child.cmdline()]


def chat(text: str, **more: Any) -> Chat:
    return Chat(messages=(ChatMessage(role="user", content=text),), **more)


def only_for_go(hostile: str) -> str:
    """A template that does harm where a message asks for it."""
    return "{% set go = messages[0].content == 'go' %}{% if go %}" + hostile + "{% endif %}{{ messages[0].content }}"


LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {  # what doubles takes a second, where others keep the machine busy, before it takes all memory
    "loops": (LOOPS, "takes more than 1 s"),
    "one number": ("{% set n = (9 if go else 1) ** (9 ** 9) %}{{ n }}", "takes more than 1 s"),
    "text that doubles": (
        "{% set ns = namespace(t='xx') %}{% for i in range(50) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
        "takes (too much memory|more than 1 s)",
    ),
    "a list that doubles": (
        "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
        "takes (too much memory|more than 1 s)",
    ),
    "a wide text": ("{{ messages[0].content | center(10 ** 10) }}", "takes too much memory"),
    "calls of itself": (
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "is nested too deeply",
    ),
    "much text": (
        "{% for i in range(90000) %}{{ 'x' * 20 }}{% endfor %}",
        "its output has 1800002 characters; the limit is",
    ),
}


CHECKED = ("one number", "a wide text", "calls of itself", "much text")
"""Each of the others takes a second and more of processor time."""


GOES_ON = ("calls of itself", "much text")
"""What leaves its process neither without time nor with a full memory."""


def ended_children_s() -> float:
    """Processor time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", chosen(HOSTILE, pytest.mark.slow, *CHECKED))
async def test_what_a_template_may_take_has_bounds(encoder_of: Any, name: str) -> None:
    source, sentence = HOSTILE[name]
    encoder, others_s = encoder_of(only_for_go(source)), ended_children_s()
    await encoder.start()
    (renderer,) = renderers()
    started_s = sum(renderer.cpu_times()[:2])
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        await encoder.encode(chat("go"), A, FACTS)
    assert refusal.value.param == "messages"
    assert len(await encoder.encode(chat("stay"), A, FACTS)) == 1, "other messages are written"
    if name in GOES_ON:
        assert renderer in renderers()
        return
    await until(lambda: not psutil.pid_exists(renderer.pid))
    assert ended_children_s() - others_s - started_s < 1.5, "it had a second"


async def test_a_template_has_no_secret_of_its_router(encoder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CONFIG_JSON", "planted")
    encoder = encoder_of("{{ messages[0].content }}")
    await encoder.start()
    (renderer,) = renderers()
    assert "BATON_CONFIG_JSON" not in renderer.environ()
    assert renderer.environ()["PATH"] == os.environ["PATH"]


async def test_only_a_message_that_is_continued_ends_at_the_mark(encoder_of: Any) -> None:
    encoder = encoder_of("{{ messages[0].content }}{% if add_generation_prompt %} go on{% endif %}")
    said = await encoder.encode(chat("CONTINUE_FINAL_MESSAGE_TAG "), A, FACTS)
    continued = await encoder.encode(chat("CONTINUE_FINAL_MESSAGE_TAG ", continue_final_message=True), A, FACTS)
    assert len(said) > len(continued) > 1


async def test_nobody_else_waits_for_a_template_that_has_no_end(encoder_of: Any) -> None:
    encoder = encoder_of(only_for_go(LOOPS))
    endless = [asyncio.create_task(encoder.encode(chat("go"), A, FACTS)) for _ in range(6)]
    await until(lambda: len(renderers()) >= 1)
    for _ in range(3):
        assert len(await encoder.encode(chat("stay"), B, FACTS)) == 1
        assert sum(task.done() for task in endless) < 3
    await cancel_and_wait(endless)


REFUSES_LATE_SYSTEMS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message first') }}"
    "{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)


async def test_system_messages_that_a_template_refuses_are_merged_into_the_first(
    encoder_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = encoder_of(REFUSES_LATE_SYSTEMS)
    for roles, written, is_logged in (
        (("system", "user"), "[system: 0][user: 1]", False),
        (("user", "system", "user"), "[system: 1][user: 0][user: 2]", True),
        (("system", "user", "system", "developer"), "[system: 0\n\n2\n\n3][user: 1]", True),
        (("system", "system"), "[system: 0\n\n1]", True),
    ):
        messages = tuple(ChatMessage(role=role, content=str(i)) for i, role in enumerate(roles))
        for _ in range(2):
            token_ids = await encoder.encode(Chat(messages=messages), A, FACTS)
            assert encoder._tokenizer.decode_all(token_ids) == written
        assert len(caplog.records) == is_logged, "once"


async def test_system_messages_stay_where_the_template_takes_them(encoder_of: Any) -> None:
    encoder = encoder_of("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    messages = (ChatMessage(role="user", content="a"), ChatMessage(role="system", content="b"))
    token_ids = await encoder.encode(Chat(messages=messages), A, FACTS)
    assert encoder._tokenizer.decode_all(token_ids) == "[user: a][system: b]"


async def test_what_a_template_refuses_for_another_reason_stays_refused(encoder_of: Any) -> None:
    encoder = encoder_of("{{ raise_exception('no ' ~ messages[0].role) }}")
    user, system = ChatMessage(role="user", content="a"), ChatMessage(role="system", content="b")
    for messages, told in (((user,), "no user"), ((user, system), "no system"), ((system, user), "no system")):
        with pytest.raises(InvalidRequest, match=told) as refusal:
            await encoder.encode(Chat(messages=messages), A, FACTS)
        assert (type(refusal.value), refusal.value.param) == (InvalidRequest, "messages")
    continued = Chat(messages=(user, system), add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="no user"):
        await encoder.encode(continued, A, FACTS)


async def test_a_template_that_does_not_compile_is_refused_at_the_start(encoder_of: Any) -> None:
    with pytest.raises(ModelLoadError, match="takes too much to load"):
        await encoder_of("{{ 9 ** (9 ** 9) }}{{ messages }}").start()
    assert renderers() == []


async def test_a_model_without_a_template_starts_without_a_process(encoder_of: Any) -> None:
    await encoder_of("").start()
    assert renderers() == []


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x | no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 500 + "{% endif %}" * 500,
        "{{ " + "9" * 5000 + " }}",
        "x" * (2**20 + 1),
    ],
    ids=["syntax", "filter", "brackets", "levels", "digits", "length"],
)
def test_what_is_no_template_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate({"default": source}, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}{{ x }}",
        "{{ 'a' | center(10 ** 10) }}{{ x }}",
        "{% autoescape 9 ** (9 ** 9) %}{{ x }}{% endautoescape %}",
        "{% if 9 ** (9 ** 9) > 1 %}{{ x }}{% endif %}",
        "{% set a = 'b' * 10 ** 11 %}{{ x }}",
    ],
)
def test_no_constant_is_computed_when_a_template_is_loaded(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    assert template.reads("x", has_tools=False)
    assert not template.reads("a", has_tools=False)


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_the_variables_of_models_templates_are_those_that_jinja_finds(path: Path) -> None:
    tree = environment_of_templates().parse(path.read_text())
    assert Variables.of(tree) == jinja2.meta.find_undeclared_variables(tree)


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ({"chat_template.jinja": b"\xff\xfe"}, {}),
        ({}, {"chat_template": [{"name": "default"}]}),
        ({}, {"chat_template": [5]}),
    ],
)
def test_templates_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, files: dict[str, bytes], config: dict[str, Any]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match="chat templates"):
        ChatTemplate.load(tmp_path, config, {})


async def test_what_a_template_gets_and_writes_survives_the_way_there_and_back(encoder_of: Any) -> None:
    encoder = encoder_of("{% for m in messages %}{{ m.content }}{% endfor %}{{ documents | tojson }}")
    document = {"t": 'ü\n"\\', "n": [1, 2.5, None, True], "\u2028": "👍🏽"}
    found = await encoder.encode(chat("größer 👍🏽\0", documents=(document,)), A, FACTS)
    tokenizer = encoder._tokenizer
    assert tokenizer.decode(found) == "größer 👍🏽\0" + json.dumps([document], ensure_ascii=False)
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        await encoder.encode(chat("a", documents=({"t": "\ud800"},)), A, FACTS)
