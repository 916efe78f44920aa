"""Chat templates of a model, and the context that they get from a chat.

Templates come with the model and are untrusted. They are parsed here and run in a sandbox (`baton.template`).

For templates that do not read them, tools, calls and their results are written into the messages of a chat. The format
is that of Hermes and Qwen 2.5: a block in the system message, `<tool_call>` in the assistant's messages, and
`<tool_response>` in the user's messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2.nodes

from baton.api import Chat
from baton.chat import ChatMessage, check_num_messages
from baton.errors import InvalidRequest, ModelLoadError
from baton.nesting import check_levels
from baton.plain_files import read_plain
from baton.template import STOPS, Variables, environment_of_templates, stop_of
from baton.tools import Tool, check_tools

CONTINUES = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue. It is the mark of transformers, so both render the same prompt."""
_NAMING = (
    jinja2.nodes.Getattr, jinja2.nodes.Getitem, jinja2.nodes.Compare, jinja2.nodes.Operand, jinja2.nodes.Call,
    jinja2.nodes.Keyword, jinja2.nodes.Filter, jinja2.nodes.Test, jinja2.nodes.List, jinja2.nodes.Tuple,
)  # fmt: skip
"""Nodes of a template whose string literals may be member names."""
MAX_SOURCE = 2**20
"""Maximum number of characters of all templates of a model."""
MAX_GROWTH, MAX_OWN = 4, 2**20
"""Limit on the characters that a template may write: MAX_GROWTH times its input, plus MAX_OWN."""
_OF_SYSTEM = "<|/tool|>"
"""Occurs in templates that read the tools from the system message (Phi 4 mini)."""
_OBSERVED = "<|observation|>"
"""Occurs in templates that render results of calls as observations (GLM 4)."""
_KNOWN_WORDS = ("developer", "tool_calls", _OF_SYSTEM, _OBSERVED)
_PARTS = "\0parts"
"""Member of a message that holds its texts and images until its content becomes a list; no template sees it."""
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables of a template that other fields of the request set."""
BLOCK = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatTemplate:
    """Templates of one model, by name. Most models have one, "default"; some have another for requests with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raise ModelLoadError if a template is not valid Jinja."""
        environment = environment_of_templates()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(templates)
        if (size := sum(map(len, templates.values()))) > MAX_SOURCE:
            raise ModelLoadError(f"the model's chat templates have {size} characters; the limit is {MAX_SOURCE}")
        try:
            trees = {name: environment.parse(source) for name, source in templates.items()}
            self._names = {name: Variables.of(tree) for name, tree in trees.items()}
            self.words = frozenset(word for tree in trees.values() for word in _words(tree)) | set(
                special_tokens.values()
            )
            """All string literals of the templates; they include all text that a template can write itself."""
            self.names = frozenset(name for tree in trees.values() for name in _names(tree))
            """Names of object members that the templates may read."""
        except STOPS as error:
            raise ModelLoadError(f"the model's chat template is not valid: {stop_of(error)}") from error
        self._takes_lists = {name: _takes_lists(tree) for name, tree in trees.items()}
        """Whether a template takes the content of each message as a list of parts only, by template name."""
        self._known_words = {
            name: frozenset(word for word in _KNOWN_WORDS if word in source) for name, source in templates.items()
        }
        """Known words that occur in the templates, by template name."""

    @property
    def parts(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The templates by name, and the texts of the special tokens by name."""
        return self._sources, self._special_tokens

    @property
    def setup(self) -> bytes:
        """First input of a process that renders the templates (`baton.template`)."""
        return json.dumps(self.parts).encode()

    @property
    def source(self) -> str:
        """Template of chats without tools; empty: the model has none."""
        return self._sources.get("default", "")

    @property
    def source_with_tools(self) -> str:
        """Template of chats with tools; empty: the model has none."""
        return self._sources.get(self._name(has_tools=True), "")

    @property
    def reads_tools(self) -> bool:
        """True if the template of chats with tools reads `tools`."""
        return self.reads("tools", has_tools=True)

    @property
    def asks_for_hermes(self) -> bool:
        """True if the router writes the tools of a chat into its messages, in the format of Hermes."""
        return not self.reads_tools and _OF_SYSTEM not in self._known_words.get(self._name(has_tools=True), ())

    def reads(self, variable: str, *, has_tools: bool) -> bool:
        """Return whether the template of chats with or without tools reads a variable."""
        return variable in self._names.get(self._name(has_tools=has_tools), ())

    @staticmethod
    def load(
        folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str], chosen: str = ""
    ) -> ChatTemplate:
        """Read chat_template.jinja and additional_chat_templates/, else tokenizer_config.json.

        Args:
            chosen: path of a file whose template replaces those of the folder; empty: use the folder's.

        Raises:
            ModelLoadError: a template cannot be read, or is invalid.
        """
        templates: dict[str, str] = {}
        place = f"model.chat_template {chosen}" if chosen else f"the chat templates in {folder}"
        try:
            match tokenizer_config.get("chat_template"):
                case str(source):
                    templates["default"] = source
                case [*named]:
                    templates |= {str(entry["name"]): str(entry["template"]) for entry in named}
            if chosen:
                templates = {"default": _source_in(Path(chosen))}
            elif (single := folder / "chat_template.jinja").is_file():
                templates = {"default": _source_in(single)}
            for path in () if chosen else sorted((folder / "additional_chat_templates").glob("*.jinja")):
                templates[path.stem] = _source_in(path)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelLoadError(f"cannot read {place}: {error!r}") from error
        return ChatTemplate(templates, special_tokens)

    def context(self, chat: Chat) -> dict[str, Any]:
        """Return the variables of the template for a chat.

        Raises:
            InvalidRequest: there is no template, it does not read a field of the chat, or a message is invalid; `param`
                names the field.
        """
        name = self._name(has_tools=bool(chat.tools))
        if name not in self._sources:
            raise InvalidRequest(
                "this model has no chat template, so it cannot answer a chat; send the prompt as text instead",
                "messages",
            )
        check_num_messages(len(chat.messages))
        check_tools(chat.tools, chat.tool_choice)
        check_levels(chat.documents, "documents")
        check_levels(chat.template_kwargs, "chat_template_kwargs")
        self._check_read(chat, name)
        known, is_read = self._known_words[name], "tools" in self._names[name]
        knows_developer = "developer" in known
        messages = [
            _for_template(message, i, knows_developer=knows_developer) for i, message in enumerate(chat.messages)
        ]
        has_calls = any(message.tool_calls or message.role in ("tool", "function") for message in chat.messages)
        if has_calls and "tool_calls" not in known:
            by_mark = {_OBSERVED: with_observations, _OF_SYSTEM: with_functools}
            write_calls = next((by_mark[mark] for mark in by_mark if mark in known), with_calls_as_text)
            if write_calls is with_calls_as_text and any(m.parts for m in chat.messages if m.role == "tool"):
                raise InvalidRequest(
                    "the model's chat template has no place for an image in a tool's result; send it as the user's",
                    "messages",
                )
            messages = write_calls(messages)
        if chat.tools and not is_read:
            write_tools = with_tools_of_system if _OF_SYSTEM in known else with_tools
            messages = write_tools(messages, chat.tools)
        if chat.continue_final_message:
            if chat.messages[-1].parts:
                raise InvalidRequest("continue_final_message cannot continue a message with images", "messages")
            if not chat.messages[-1].content:
                raise InvalidRequest(
                    "continue_final_message needs content in the last message; it has none", "continue_final_message"
                )
            messages[-1]["content"] += CONTINUES
        takes_lists = self._takes_lists[name]
        if takes_lists or any(message.parts for message in chat.messages):
            messages = [_in_parts(message, takes_lists=takes_lists) for message in messages]
        return {
            **chat.template_kwargs,
            "messages": messages,
            "tools": [tool.in_openai_form() for tool in chat.tools] if chat.tools and is_read else None,
            "documents": list(chat.documents) or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def question(self, context: Mapping[str, Any]) -> bytes:
        """Return the input of a process that renders a chat.

        Args:
            context: see `context`.
        """
        name = self._name(has_tools=bool(context["tools"]))
        text = json.dumps([name, context])
        return f"{text[:-1]},{MAX_GROWTH * len(text) + MAX_OWN}]".encode()

    def _check_read(self, chat: Chat, name: str) -> None:
        """Raise InvalidRequest for variables that the template does not read, because they would have no effect."""
        given = {**dict.fromkeys(chat.template_kwargs, "chat_template_kwargs")}
        if reserved := next((each for each in given if each in RESERVED), None):
            raise InvalidRequest(f"chat_template_kwargs cannot set {reserved!a}", "chat_template_kwargs")
        if chat.documents:
            given["documents"] = "documents"
        unread = next((each for each in given if each not in self._names[name]), None)
        if unread is not None:
            raise InvalidRequest(
                f"the model's chat template does not read {unread[:64]!a}, so it would change nothing; leave it out",
                given[unread],
            )

    def _name(self, *, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._sources else "default"


def _source_in(path: Path) -> str:
    """Return the template in a file.

    Raises:
        OSError: it is not a regular file, or too long.
        ValueError: it is not UTF-8 text.
    """
    text = read_plain(path, MAX_SOURCE).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def with_systems_first(chat: Chat) -> Chat | None:
    """Return a chat with the texts of all system messages merged into the first message, in order.

    Some templates refuse later system messages.

    Returns:
        None if there is nothing to merge, or if the last message is a system message that is continued.
    """
    systems = [message for message in chat.messages if message.role in _SYSTEMS]
    others = [message for message in chat.messages if message.role not in _SYSTEMS]
    is_continued = chat.continue_final_message and chat.messages[-1].role in _SYSTEMS
    if not systems or is_continued or list(chat.messages) == [systems[0], *others]:
        return None
    first = replace(systems[0], content="\n\n".join(message.content for message in systems if message.content))
    return replace(chat, messages=(first, *others))


_SYSTEMS = ("system", "developer")


def _for_template(message: ChatMessage, index: int, *, knows_developer: bool) -> dict[str, Any]:
    """Return a message in the form that templates expect.

    Raises:
        InvalidRequest: the message is invalid.
    """
    message.check(index)
    # `developer` is OpenAI's newer name for `system`, which most templates do not know.
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": message.content}
    if message.name:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = message.parsed_tool_calls()
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        plain |= {"thinking": message.reasoning, "reasoning_content": message.reasoning}
    if message.parts:
        plain[_PARTS] = message.parts
    return plain


def _in_parts(message: Mapping[str, Any], *, takes_lists: bool) -> dict[str, Any]:
    """Return a message with its content as a list, as transformers' processors give it to templates.

    Args:
        takes_lists: the content of a message without images becomes a list, too.
    """
    plain = dict(message)
    parts = plain.pop(_PARTS, (plain["content"],) if takes_lists else ())
    if parts:
        plain["content"] = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    return plain


def _takes_lists(tree: jinja2.nodes.Template) -> bool:
    """Return whether a template loops over the parts of each content, without a case for a content that is a text.

    Such a template would render no text, or one character at a time.
    """
    nodes = jinja2.nodes
    contents = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter):
            node = node.node
        return _is_content(node) or (isinstance(node, nodes.Name) and node.name in contents)

    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return False
    return not any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test))


def _is_content(node: jinja2.nodes.Node | None) -> bool:
    match node:
        case jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
    return False


def _words(tree: jinja2.nodes.Template) -> Iterator[str]:
    for node in tree.find_all((jinja2.nodes.TemplateData, jinja2.nodes.Const)):
        match node:
            case jinja2.nodes.TemplateData(data=text) | jinja2.nodes.Const(value=str(text)):
                yield text


def _names(tree: jinja2.nodes.Template) -> Iterator[str]:
    for node in tree.find_all(_NAMING):
        if isinstance(node, jinja2.nodes.Getattr):
            yield node.attr
        yield from (
            each.value
            for each in node.iter_child_nodes()
            if isinstance(each, jinja2.nodes.Const) and isinstance(each.value, str)
        )


def until_continued(text: str) -> str:
    """Return the prompt up to the end of the message to continue. Some templates strip white space there.

    Raises:
        InvalidRequest: the template does not render the end of the message.
    """
    end = text.rfind(CONTINUES.strip())
    if end < 0:
        raise InvalidRequest(
            "the model's chat template omits the end of the last message, so it cannot be continued", "messages"
        )
    return text[:end] if text.startswith(CONTINUES, end) else text[:end].rstrip()


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages with the tools in the first system message, which is added if there is none."""
    signatures = "\n".join(json.dumps(tool.in_openai_form(), ensure_ascii=False) for tool in tools)
    block = BLOCK.format(tools=signatures)
    first, *others = map(dict, messages)
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{block}" if first["content"] else block}, *others]
    return [{"role": "system", "content": block}, first, *others]


def with_tools_of_system(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages with the tools as a member of the system message, as Phi 4 mini's template reads them."""
    described = json.dumps([tool.in_openai_form()["function"] for tool in tools], ensure_ascii=False)
    first, *others = map(dict, messages)
    if first["role"] == "system":
        return [{**first, "tools": described}, *others]
    return [{"role": "system", "content": "", "tools": described}, first, *others]


def with_functools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls as text in the assistant's messages, in the format of Phi 4 mini."""
    written = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls := [_function_of(call) for call in message.get("tool_calls", ())]:
            plain["content"] += f"functools{json.dumps(calls, ensure_ascii=False)}"
        written.append(plain)
    return written


def with_observations(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as GLM 4's template reads them.

    Each call becomes a separate message whose `metadata` is the tool's name, and results become observations.
    """
    written: list[dict[str, Any]] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        if message["role"] in ("tool", "function"):
            plain["role"] = "observation"
        calls = message.get("tool_calls", ())
        if plain["content"] or not calls:
            written.append(plain)
        for function in map(_function_of, calls):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            written.append({"role": "assistant", "metadata": function["name"], "content": arguments})
    return written


def with_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls as text in the assistant's messages, and results in the user's messages."""
    written: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] in ("tool", "function")
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
        else:
            calls = [_as_text(call) for call in message.get("tool_calls", ())]
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            written.append({**plain, "content": "\n".join([*filter(None, [plain["content"]]), *calls])})
        was_result = is_result
    return written


def _as_text(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(_function_of(call), ensure_ascii=False)}\n</tool_call>"


def _function_of(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
