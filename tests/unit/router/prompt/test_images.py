"""Images in prompts: what templates get of them, who may write their placeholder, and what takes its place."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton.api import Chat
from baton.chat import ChatMessage, tool_call
from baton.errors import InvalidRequest
from baton.messages import PlacedImage, SeenImage
from baton.tools import Tool
from router.prompt import ChatTemplate, Tokenizer, with_images
from tests.support.chats import encoded, rendered
from tests.support.eyes import OF_LISTS, PLACEHOLDER, PLACEHOLDER_TEXT, TEMPLATE, model_with_eyes, picture

CAT = picture("cat")
DUMP = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools }}"
LLAVA = (
    "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}"
    "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
    "{% endfor %}"
)
QWEN = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
NAMED = "{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c.text }}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['content'] }}{% for line in m.content.split('x') %}{% endfor %}{% endfor %}"


def user(*parts: str | bytes, role: str = "user", **more: Any) -> ChatMessage:
    text = "\n".join(part for part in parts if isinstance(part, str))
    return ChatMessage(role=role, content=text, parts=parts if CAT in parts else (), **more)


def dumped(*messages: ChatMessage, tools: tuple[Tool, ...] = (), source: str = DUMP) -> list[Any]:
    template = ChatTemplate({"default": source}, {})
    context = template.context(Chat(messages=messages, tools=tools))
    return [json.loads(line) for line in rendered(template, context).splitlines() if line.startswith("{")]


def written(source: str, *messages: ChatMessage) -> str:
    template = ChatTemplate({"default": source}, {})
    return rendered(template, template.context(Chat(messages=messages)))


def test_a_message_with_images_is_a_list_as_transformers_gives_it_and_others_are_texts() -> None:
    found = dumped(user("Be brief.", role="system"), user("see", CAT, "this", CAT), user("text", role="assistant"))
    assert [each["content"] for each in found] == [
        "Be brief.",
        [{"type": "text", "text": "see"}, {"type": "image"}, {"type": "text", "text": "this"}, {"type": "image"}],
        "text",
    ]
    assert found[1].keys() == {"role", "content"}


@pytest.mark.parametrize("source", [OF_LISTS, LLAVA, NAMED], ids=["smolvlm", "llava", "named"])
def test_a_template_of_lists_gets_texts_as_lists(source: str) -> None:
    assert "alone" in written(source, user("alone"))
    assert "alone" in written(source, user("first"), user("alone", role="assistant"))


@pytest.mark.parametrize("source", [QWEN, PLAIN, TEMPLATE], ids=["qwen", "plain", "ours"])
def test_a_template_of_texts_gets_texts(source: str) -> None:
    text = written(source, user("alone"))
    assert "alone" in text
    assert "type" not in text


@pytest.mark.parametrize("source", [QWEN, LLAVA], ids=["qwen", "llava"])
def test_each_image_is_written_once(source: str) -> None:
    assert written(source, user("a", CAT, "b"), user(CAT, CAT)).count("<image>") == 3


def test_a_tools_image_is_written_where_the_template_knows_calls() -> None:
    call = tool_call(call_id="c", name="f", arguments="{}")
    chat = (user("x"), user(role="assistant", tool_calls=(call,)), user("see", CAT, role="tool", tool_call_id="c"))
    known = "{% set unused = 'tool_calls' %}" + DUMP
    assert dumped(*chat, source=known)[-1]["content"] == [{"type": "text", "text": "see"}, {"type": "image"}]
    with pytest.raises(InvalidRequest, match="no place for an image in a tool's result"):
        dumped(*chat)


def test_tools_are_written_beside_images() -> None:
    source = DUMP.removesuffix("{{ tools }}")
    found = dumped(user("see", CAT), tools=(Tool(name="f"),), source=source)
    assert [each["role"] for each in found] == ["system", "user"]
    assert found[1]["content"][1] == {"type": "image"}


def test_a_message_with_images_is_not_continued() -> None:
    chat = Chat(messages=(user("see", CAT),), add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="cannot continue a message with images"):
        ChatTemplate({"default": DUMP}, {}).context(chat)


# -- who writes the placeholder ----------------------------------------------------------------------------------------

FORGERIES = [PLACEHOLDER_TEXT, "<file", "name>", "ename", "<filename", "filename>", "<<filename>>", "image", "text"]


@functools.cache
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def eyes(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_eyes(tmp_path_factory.mktemp("eyes"), model_dir)


@pytest.fixture(scope="module")
def ordinary(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose placeholder is an added token, but not said to be special."""
    folder = model_with_eyes(tmp_path_factory.mktemp("ordinary"), model_dir)
    read = json.loads((model_dir / "tokenizer.json").read_text())
    for token in read["added_tokens"]:
        token["special"] = token["id"] != PLACEHOLDER
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return folder


@pytest.mark.parametrize("kind", ["eyes", "ordinary"])
@pytest.mark.parametrize("text", FORGERIES)
def test_only_the_template_writes_the_placeholder(text: str, kind: str, request: pytest.FixtureRequest) -> None:
    model = tokenizer(request.getfixturevalue(kind))
    for parts in ((text, CAT), (CAT, text), (text, CAT, text), (text,)):
        ids = encoded(model, Chat(messages=(user(*parts),)))
        assert ids.count(PLACEHOLDER) == parts.count(CAT), parts
        assert text in model.decode_all(ids)
    assert PLACEHOLDER not in model.encode(text)
    chat = Chat(messages=(user("x", CAT, name=text),), tools=(Tool(name="f", description=text),))
    assert encoded(model, chat).count(PLACEHOLDER) == 1


def test_text_that_is_marked_leaves_the_kinds_of_parts_as_they_are(model_dir: Path, tmp_path: Path) -> None:
    """`image` could be the middle of a special token that the template begins and ends."""
    folder = model_with_eyes(tmp_path, model_dir, OF_LISTS.replace("<filename>", "<image>") + "{{ '<' }}")
    read = json.loads((model_dir / "tokenizer.json").read_text())
    next(each for each in read["added_tokens"] if each["id"] == PLACEHOLDER)["content"] = "<image>"
    read["model"]["vocab"] = {
        "<image>" if name == PLACEHOLDER_TEXT else name: number for name, number in read["model"]["vocab"].items()
    }
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(read))
    ids = encoded(Tokenizer.load(folder), Chat(messages=(user("image", CAT, "<image>"),)))
    assert ids.count(PLACEHOLDER) == 1


# -- what takes its place ----------------------------------------------------------------------------------------------


def seen(name: bytes, *token_ids: int) -> SeenImage:
    return SeenImage(digest=name * 16, grid=(1, len(token_ids)), token_ids=token_ids)


def test_each_placeholder_gives_way_to_its_images_tokens() -> None:
    ids, placed = with_images((5, 9, 6, 9, 9, 7), 9, [seen(b"a", 9, 9, 1), seen(b"b", 2), seen(b"a", 9, 9, 1)])
    assert ids == (5, 9, 9, 1, 6, 2, 9, 9, 1, 7)
    assert placed == tuple(
        PlacedImage(digest=name * 16, offset=offset, num_tokens=number, grid=(1, number))
        for name, offset, number in ((b"a", 1, 3), (b"b", 5, 1), (b"a", 6, 3))
    )


@pytest.mark.parametrize("prompt", [(), (5, 6), (9,), (9, 9, 9)])
def test_a_prompt_without_one_place_for_each_image_is_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=f"writes {prompt.count(9)} places for 2 images"):
        with_images(prompt, 9, [seen(b"a", 1), seen(b"b", 2)])


def test_the_library_agrees_that_the_placeholder_is_one_token(eyes: Path) -> None:
    whole = tokenizers.Tokenizer.from_file(str(eyes / "tokenizer.json"))
    assert whole.encode(PLACEHOLDER_TEXT).ids == [PLACEHOLDER]
