"""Requests that clients and agents have sent, recorded: each answer is one that its client's own package reads.

`clients/NAME.json` has what one client sent in its main modes to a server that recorded it, with its version. Keys, ids
and paths are replaced, and long texts are cut short; fields, types and tools are as they were. The router's service is
the real one, with the default model's tokenizer and template; instead of workers, `Scripted` writes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import openai
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.grammar import GrammarCompiler, GrammarMatcher
from baton.messages import NewTokens
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.structure import StructuredOutputs
from router.answer import AnswerFormat
from router.prompt import Tokenizer
from router.serve.choice import Choice, ChoiceGroup
from tests.unit.router.test_service import OneToken, Router

Json = dict[str, Any]
SAID = "It is sunny in Bern."
ARGUMENTS = {"city": "Bern"}
MOST_TOKENS = 400
"""A structure that has no end by then has none."""
RECORDED = sorted((Path(__file__).parent / "clients").glob("*.json"))
REFUSED = ("functions", "thread")
"""Fields that are refused: of one, `tools` is the newer name; without the other, Anthropic's loop goes on by itself."""
WINDOW = 16384
"""Tokens of the context window: fewer than Claude Code asks for."""


OFTEN = 2
"""Requests of each client that `make check` replays; `make test` replays all."""


def recordings() -> Iterator[Any]:
    for path in RECORDED:
        recorded = json.loads(path.read_text())
        for number, request in enumerate(recorded["requests"]):
            name = f"{recorded['client']}-{request['mode']}-{number}"
            yield pytest.param(request, id=name, marks=[pytest.mark.slow] if number >= OFTEN else [])


# -- what stands for the workers ---------------------------------------------------------------------------------------


class Scripted(OneToken):
    """A driver that writes a text, or the shortest answer that its structure allows."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._end = tokenizer.encode("<|im_end|>", parse_special=True)[0]
        self._compiler = GrammarCompiler(folder / "tokenizer.json", tokenizer.vocab_size, [self._end])
        self._closing = [self._end, *(tokenizer.encode(text)[0] for text in ('"', "}", "]", ",", ":"))]
        self.script: str | None = None
        """None: the structure says what is written."""

    async def run(self, group: ChoiceGroup) -> AsyncIterator[tuple[Choice, NewTokens]]:
        for choice in group.choices:
            sampling = choice.spec.sampling
            structure = sampling.structured_outputs
            written = self._tokens(structure)
            most = sampling.max_tokens or len(written)
            for number, token in enumerate(written[:most], 1):
                last = number == min(most, len(written))
                reason = (FinishReason.LENGTH if most < len(written) else FinishReason.STOP) if last else None
                choice.emitted.append(token)
                choice.finish_reason = reason
                yield choice, NewTokens(token_ids=(token,), finish_reason=reason, scores=_scores(sampling.logprobs))

    def _tokens(self, structure: StructuredOutputs | None) -> list[int]:
        if self.script is not None or structure is None:
            return [*self._tokenizer.encode(self.script or SAID), self._end]
        matcher, written = self._compiler.compile(structure), list[int]()
        while len(written) < MOST_TOKENS and self._end not in written:
            written.append(self._next(matcher))
            if written[-1] != self._end:
                matcher.take(written[-1:])
        assert written[-1] == self._end, self._tokenizer.decode(written)
        return written

    def _next(self, matcher: GrammarMatcher) -> int:
        """What closes a value, if it may; else the first token, of white space only if there is no other."""
        bits = int.from_bytes(matcher.allowed(), "little")
        for token in self._closing:
            if bits >> token & 1:
                return token
        allowed = [token for token in range(self._tokenizer.vocab_size) if bits >> token & 1]
        return next((token for token in allowed if self._tokenizer.token_bytes(token).strip()), allowed[0])


def _scores(asked: int | None) -> TokenScores:
    return TokenScores() if asked is None else TokenScores((-0.5,), range(5, 5 + asked), [-0.5] * asked)


# -- what a request asks for -------------------------------------------------------------------------------------------


class Asked:
    """What an answer to a recorded body is to be."""

    def __init__(self, path: str, body: Json) -> None:
        self.api = path.partition("?")[0].removeprefix("/v1/")
        self.body = body
        self.tools = dict(self._functions(body.get("tools") or ()))
        choice = body.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        self.is_forced = kind in ("required", "any", "tool", "function", "allowed_tools")
        self.calls = self.is_forced or (bool(self.tools) and kind != "none" and not self._has_results())

    def _functions(self, tools: Any) -> Iterator[tuple[str, Json]]:
        for tool in tools:
            if tool.get("type") == "namespace":
                yield from self._functions(tool["tools"])
            elif "input_schema" in tool:
                yield tool["name"], tool["input_schema"]
            elif tool.get("type") == "function":
                function = tool.get("function", tool)
                yield function["name"], function.get("parameters") or {}

    def _has_results(self) -> bool:
        said = self.body.get("messages") or self.body.get("input")
        last = said[-1] if isinstance(said, list) else {}
        if last.get("role") == "tool" or last.get("type") == "function_call_output":
            return True
        parts = last.get("content")
        return isinstance(parts, list) and any(part.get("type") == "tool_result" for part in parts)

    @property
    def schema(self) -> Json | None:
        """The schema of the text; an empty one is any object's."""
        if self.api == "responses":
            form = (self.body.get("text") or {}).get("format") or {}
        elif self.api == "messages":
            form = (self.body.get("output_config") or {}).get("format") or {}
        else:
            form = self.body.get("response_format") or {}
        match form.get("type"):
            case "json_schema":
                found: Json = form["schema"] if "schema" in form else form["json_schema"]["schema"]
                return found
            case "json_object":
                return form.get("schema") or {"type": "object"}
        return None

    @property
    def script(self) -> str | None:
        if self.calls and not self.is_forced:
            return f"<tool_call>\n{json.dumps({'name': next(iter(self.tools)), 'arguments': ARGUMENTS})}\n</tool_call>"
        return None if self.calls or self.schema is not None else SAID

    def check(self, text: str, calls: list[tuple[str, Any]], ending: str) -> None:
        """Checks an answer's text, its calls, and the reason why it ended."""
        if ending in ("length", "max_tokens", "incomplete"):
            assert SAID.startswith(text)
            return
        assert ending in (("tool_calls", "tool_use") if self.calls else ("stop", "end_turn")) or ending == "completed"
        assert bool(calls) == self.calls
        for name, arguments in calls:
            if self.is_forced:
                jsonschema.validate(arguments, self.tools[name])
            else:
                assert (name, arguments) == (next(iter(self.tools)), ARGUMENTS)
        if self.schema is not None and not self.calls:
            jsonschema.validate(json.loads(text), self.schema)
        elif not self.calls:
            assert text == SAID


# -- how its client reads an answer ------------------------------------------------------------------------------------


async def chat_read(client: openai.AsyncOpenAI, asked: Asked, options: Any) -> None:
    body, how = asked.body, {"cast_to": ChatCompletion, "body": asked.body, "options": options}
    if body.get("stream"):
        state = ChatCompletionStreamState(input_tools=body.get("tools") or openai.omit)
        kind = openai.AsyncStream[ChatCompletionChunk]
        chunks = [each async for each in await client.post("/chat/completions", **how, stream=True, stream_cls=kind)]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.to_dict())
            state.handle_chunk(chunk)
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        assert (chunks[-1].usage is not None) == wants_usage
        answer: ChatCompletion = state.get_final_completion()
    else:
        answer = ChatCompletion.model_validate((await client.post("/chat/completions", **how)).to_dict())
        assert answer.usage is not None
    assert len(answer.choices) == (body.get("n") or 1)
    for choice in answer.choices:
        assert (choice.logprobs is not None) == bool(body.get("logprobs"))
        calls: Any = choice.message.tool_calls or ()
        found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        asked.check(choice.message.content or "", found, choice.finish_reason)


async def response_read(client: openai.AsyncOpenAI, asked: Asked, options: Any) -> None:
    how: Any = {"cast_to": Response, "body": asked.body, "options": options}
    if asked.body.get("stream"):
        kind = openai.AsyncStream[ResponseStreamEvent]
        events = [each async for each in await client.post("/responses", **how, stream=True, stream_cls=kind)]
        of_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        for number, event in enumerate(events):
            assert type(of_event.validate_python(event.to_dict())) is type(event)
            assert event.sequence_number == number
        assert events[-1].type in ("response.completed", "response.incomplete")
        answer = events[-1].response
    else:
        answer = await client.post("/responses", **how)
    answer = Response.model_validate(answer.to_dict())
    assert answer.usage is not None
    calls = [item for item in answer.output if item.type == "function_call"]
    asked.check(answer.output_text, [(call.name, json.loads(call.arguments)) for call in calls], answer.status or "")


async def message_read(client: anthropic.AsyncAnthropic, path: str, asked: Asked, options: Any) -> None:
    how: Any = {"cast_to": Message, "body": asked.body, "options": options}
    if asked.body.get("stream"):
        kind = anthropic.AsyncStream[RawMessageStreamEvent]
        of_event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        async for event in await client.post(path, **how, stream=True, stream_cls=kind):
            assert type(of_event.validate_python(event.to_dict())) is type(event)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
        assert event.type == "message_stop"
        answer = Message.model_validate(snapshot.to_dict())
    else:
        answer = Message.model_validate((await client.post(path, **how)).to_dict())
    assert answer.usage.output_tokens > 0
    text = "".join(block.text for block in answer.content if block.type == "text")
    calls: list[tuple[str, Any]] = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    asked.check(text, calls, answer.stop_reason or "")


async def other_read(http: httpx2.AsyncClient, request: Json) -> None:
    answer = await http.request(
        request["method"], request["path"], json=request.get("body"), headers=request["headers"]
    )
    assert answer.status_code == 200, answer.text
    match request["path"]:
        case "/v1/completions":
            (choice,) = Completion.model_validate(answer.json()).choices
            assert SAID.startswith(choice.text)
        case "/v1/messages/count_tokens":
            assert MessageTokensCount.model_validate(answer.json()).input_tokens > 0
        case "/v1/models":
            (model,) = answer.json()["data"]
            Model.model_validate(model)
            anthropic.types.ModelInfo.model_validate(model)


# -- the test ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[tuple[Router, Scripted]]:
    tokenizer = Tokenizer.load(model_dir)
    scripted = Scripted(tokenizer, model_dir)
    router = Router(tokenizer, scripted, AnswerFormat.load(tokenizer), WINDOW)
    yield router, scripted
    router.close()


@pytest.mark.asyncio(loop_scope="module")  # the processes that the service starts belong to a loop
@pytest.mark.parametrize("request_", list(recordings()))
async def test_an_answer_is_what_its_client_reads(served: tuple[Router, Scripted], request_: Json) -> None:
    router, scripted = served
    transport = httpx2.ASGITransport(router.app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://baton") as http:
        body, path, headers = request_.get("body"), request_["path"], request_["headers"]
        if body is None:
            await other_read(http, request_)
            return
        body["model"] = ""
        if any(name in body for name in REFUSED):
            refusal = await http.post(path, json=body, headers=headers)
            assert refusal.status_code == 400
            assert "is not supported" in refusal.json()["error"]["message"]
            return
        asked = Asked(path, body)
        scripted.script = asked.script
        options = {"headers": {name: value for name, value in headers.items() if name != "accept"}}
        openais = openai.AsyncOpenAI(base_url="http://baton/v1", api_key="none", http_client=http, max_retries=0)
        match asked.api:
            case "chat/completions":
                await chat_read(openais, asked, options)
            case "responses":
                await response_read(openais, asked, options)
            case "messages":
                claudes = anthropic.AsyncAnthropic(
                    base_url="http://baton", api_key="none", http_client=http, max_retries=0
                )
                await message_read(claudes, path, asked, options)
            case _:
                await other_read(http, request_)


def test_enough_clients_are_recorded() -> None:
    assert len(RECORDED) >= 10
