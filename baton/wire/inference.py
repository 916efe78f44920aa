"""Contract of clients (`inference.proto`): requests, response chunks, sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton import api
from baton.chat import ChatMessage, check_num_messages, check_one_end, content_of, tool_call
from baton.errors import InvalidRequest, Unsupported
from baton.images import check_image
from baton.sampling import FinishReason, SamplingParams
from baton.scores import NO_SCORES, TokenScores
from baton.structure import StructuredOutputs
from baton.tools import Tool, ToolCallDelta, ToolChoice, ToolUse
from baton.v1 import inference_pb2
from baton.wire.convert import SAMPLING_NAMES, check_items, from_pb, to_pb

UNBOUNDED = 2**31


def write_sampling(params: SamplingParams, message: inference_pb2.SamplingParams) -> None:
    """Encode non-default values into an empty message."""
    message.SetInParent()
    if asked := params.asked:
        message.MergeFrom(_asked_sampling(asked))


def sampling_from_pb(message: inference_pb2.SamplingParams) -> SamplingParams:
    """Decode sampling parameters.

    Raises:
        InvalidRequest: a value is out of range.
        Unsupported: a field of the contract is set that this release does not have.
    """
    return SamplingParams(**_sampling_set_in(message))


def _sampling_set_in(message: inference_pb2.SamplingParams) -> dict[str, Any]:
    """Return the set fields.

    Raises Unsupported for a field of the contract that this release does not have, and InvalidRequest for a field of
    too many items, before they are copied.
    """
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name not in SAMPLING_NAMES:
            raise Unsupported(f"sampling.{field.name} is not supported yet; leave it unset", field.name)
        if field.is_repeated:
            check_items(field.name, len(value))
        if field.name == "logit_bias":
            found[field.name] = tuple(sorted(value.items()))
        elif field.name == "bad_word_ids":
            check_items(field.name, sum(len(word.ids) for word in value))
            found[field.name] = tuple(tuple(word.ids) for word in value)
        elif field.name == "structured_outputs":
            found[field.name] = _structure_from_pb(value)
        else:
            found[field.name] = tuple(value) if field.is_repeated else value
    return found


def _structure_from_pb(message: inference_pb2.StructuredOutputs) -> StructuredOutputs:
    """Decode a structure; raises InvalidRequest unless it requests exactly one, of an allowed size."""
    return from_pb(message, StructuredOutputs)


def generate_request_from_pb(
    message: inference_pb2.GenerateRequest, max_prompt_tokens: int = UNBOUNDED
) -> api.GenerateRequest:
    """Decode a client's request.

    Args:
        max_prompt_tokens: limit of the token ids that are copied.

    Raises:
        InvalidRequest: it has no input, or too many elements in a field.
        Unsupported: it sets a field that is not supported; the message names it.
    """
    check_items("resume_from", len(message.resume_from))
    truncation = _truncation_from_pb(message)
    if message.WhichOneof("input") == "token_ids":
        prompt: api.PromptInput = api.TokenIds.of(message.token_ids.ids, max_prompt_tokens, truncation)
    else:
        prompt = _prompt_from_pb(message)
    return api.GenerateRequest(
        prompt=prompt,
        request_id=message.request_id,
        model=message.model,
        sampling=_sampling_set_in(message.sampling),
        skip_text=message.stream_options.skip_text,
        skip_reasoning=message.stream_options.skip_reasoning,
        priority=message.priority,
        ttft_ms=message.slo.ttft_ms if message.slo.HasField("ttft_ms") else None,
        itl_ms=message.slo.itl_ms if message.slo.HasField("itl_ms") else None,
        e2e_ms=message.slo.e2e_ms if message.slo.HasField("e2e_ms") else None,
        resume_from=dict(message.resume_from),
        truncation=truncation,
    )


def tokenize_request_from_pb(message: inference_pb2.TokenizeRequest) -> api.PromptInput:
    """Decode the prompt of a request to tokenize. Raises like `generate_request_from_pb`."""
    return _prompt_from_pb(message)


def tokenize_response(token_ids: tuple[int, ...], max_model_len: int) -> inference_pb2.TokenizeResponse:
    """Encode a prompt's token ids."""
    return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)


def generate_response(chunk: api.GenerateChunk) -> inference_pb2.GenerateResponse:
    """Encode a chunk of a response."""
    message = inference_pb2.GenerateResponse(
        request_id=chunk.request_id,
        choice_index=chunk.choice_index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=chunk.finish_reason or "",
        usage=to_pb(chunk.usage, inference_pb2.Usage) if chunk.usage else None,
        timing=to_pb(chunk.timing, inference_pb2.Timing) if chunk.timing else None,
    )
    if chunk.reasoning:
        message.reasoning = chunk.reasoning
    for call in chunk.tool_calls:
        message.tool_calls.add(
            index=call.index,
            id=call.call_id,
            name=call.name,
            arguments_json=call.arguments,
            content_offset=call.content_offset,
        )
    if chunk.scores:
        _add_scores(message.logprobs, chunk.token_ids, chunk.scores)
    if chunk.prompt_scores is not None:
        token_ids, scores = chunk.prompt_scores.token_ids, chunk.prompt_scores.scores
        message.prompt_logprobs.add(token_id=token_ids[0])
        _add_scores(message.prompt_logprobs, token_ids[1:], scores)
    match chunk.stop_reason:
        case str(stop_string):
            message.stop_string = stop_string
        case int(token_id):
            message.stop_token_id = token_id
    return message


def _add_scores(messages: Any, token_ids: Sequence[int], scores: TokenScores) -> None:
    for index, logprob in enumerate(scores.logprobs):
        token = messages.add(token_id=token_ids[index], logprob=logprob)
        for token_id, of_top in scores.top(index):
            token.top.add(token_id=token_id, logprob=of_top)


def generate_request(request: api.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Encode a client's request."""
    message = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=_asked_sampling(request.sampling),
        stream_options=inference_pb2.StreamOptions(skip_text=request.skip_text, skip_reasoning=request.skip_reasoning),
        priority=request.priority,
        resume_from=request.resume_from,
    )
    if request.truncation is not None:
        message.truncate_prompt_tokens = request.truncation.num_tokens
        message.truncation_side = request.truncation.side
    objectives = {"ttft_ms": request.ttft_ms, "itl_ms": request.itl_ms, "e2e_ms": request.e2e_ms}
    if any(value is not None for value in objectives.values()):
        message.slo.MergeFrom(inference_pb2.ServiceLevelObjective(**objectives))
    match request.prompt:
        case api.Text(text=text):
            message.text = text
            message.parse_special = request.prompt.parse_special
            message.add_special_tokens = request.prompt.add_special_tokens
        case api.TokenIds(ids):
            message.token_ids.ids.extend(ids)
        case api.Chat():
            _write_chat(request.prompt, message.chat)
            message.parse_special = request.prompt.parse_special
    return message


def _write_chat(chat: api.Chat, message: inference_pb2.ChatInput) -> None:
    message.CopyFrom(
        inference_pb2.ChatInput(
            messages=[_chat_message(each) for each in chat.messages],
            template_kwargs_json=json.dumps(dict(chat.template_kwargs)) if chat.template_kwargs else "",
            tools=[_tool(tool) for tool in chat.tools],
            tool_choice=chat.tool_choice.use,
            tool_choice_name=chat.tool_choice.name,
            parallel_tool_calls=chat.tool_choice.is_parallel,
            documents_json=[json.dumps(dict(document)) for document in chat.documents],
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
        )
    )


def _tool(tool: Tool) -> inference_pb2.Tool:
    return inference_pb2.Tool(
        name=tool.name,
        description=tool.description or "",
        parameters_json="" if tool.parameters is None else json.dumps(tool.parameters),
        strict=tool.strict,
    )


def _chat_message(message: ChatMessage) -> inference_pb2.ChatMessage:
    calls = [
        inference_pb2.ToolCall(id=call["id"], name=function["name"], arguments_json=function["arguments"])
        for call in message.tool_calls
        for function in (call["function"],)
    ]
    return inference_pb2.ChatMessage(
        role=message.role,
        content="" if message.parts else message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=calls,
        reasoning=message.reasoning,
        parts=[
            inference_pb2.ContentPart(text=part) if isinstance(part, str) else inference_pb2.ContentPart(image=part)
            for part in message.parts
        ],
    )


def _asked_sampling(asked: Mapping[str, Any]) -> inference_pb2.SamplingParams:
    fields = dict(asked)
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    if "bad_word_ids" in fields:
        fields["bad_word_ids"] = [inference_pb2.TokenIds(ids=ids) for ids in fields["bad_word_ids"]]
    if "structured_outputs" in fields:
        fields["structured_outputs"] = to_pb(fields["structured_outputs"], inference_pb2.StructuredOutputs)
    return inference_pb2.SamplingParams(**fields)


def generate_chunk(message: inference_pb2.GenerateResponse) -> api.GenerateChunk:
    """Decode a chunk of a response."""
    return api.GenerateChunk(
        request_id=message.request_id,
        choice_index=message.choice_index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        reasoning=message.reasoning,
        tool_calls=tuple(map(_tool_call_delta, message.tool_calls)),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_reason=getattr(message, which) if (which := message.WhichOneof("stop_reason")) else None,
        usage=from_pb(message.usage, api.Usage) if message.HasField("usage") else None,
        timing=from_pb(message.timing, api.Timing) if message.HasField("timing") else None,
        scores=_scores(message.logprobs) if message.logprobs else NO_SCORES,
        prompt_scores=_prompt_scores(message.prompt_logprobs) if message.prompt_logprobs else None,
    )


def _tool_call_delta(call: inference_pb2.ToolCall) -> ToolCallDelta:
    return ToolCallDelta(
        index=call.index,
        arguments=call.arguments_json,
        call_id=call.id,
        name=call.name,
        content_offset=call.content_offset,
    )


def _prompt_scores(tokens: Sequence[inference_pb2.TokenLogprobs]) -> api.PromptScores:
    return api.PromptScores(tuple(token.token_id for token in tokens), _scores(tokens[1:]))


def _scores(tokens: Sequence[inference_pb2.TokenLogprobs]) -> TokenScores:
    tops = [top for token in tokens for top in token.top]
    return TokenScores(
        tuple(token.logprob for token in tokens),
        tuple(top.token_id for top in tops),
        tuple(top.logprob for top in tops),
    )


def list_models_response(cards: list[api.ModelCard]) -> inference_pb2.ListModelsResponse:
    """Encode the served models."""
    return inference_pb2.ListModelsResponse(models=[to_pb(card, inference_pb2.Model) for card in cards])


def _prompt_from_pb(message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> api.PromptInput:
    match message.WhichOneof("input"):
        case "text":
            adds = message.add_special_tokens if message.HasField("add_special_tokens") else True
            return api.Text(message.text, message.parse_special, adds)
        case "chat":
            return _chat_from_pb(message.chat, parse_special=message.parse_special)
    raise InvalidRequest("the request has no input; set one of text, chat or token_ids", "input")


def _chat_from_pb(message: inference_pb2.ChatInput, *, parse_special: bool) -> api.Chat:
    continues = message.continue_final_message
    begins = message.add_generation_prompt if message.HasField("add_generation_prompt") else not continues
    check_one_end(begins=begins, continues=continues)
    check_num_messages(len(message.messages) or 1)
    check_items("documents_json", len(message.documents_json))
    kwargs = message.template_kwargs_json
    return api.Chat(
        messages=tuple(_chat_message_from_pb(each, index) for index, each in enumerate(message.messages)),
        tools=tuple(_tool_from_pb(tool) for tool in message.tools),
        tool_choice=_tool_choice_from_pb(message),
        documents=tuple(_object_from_json(each, "documents_json") for each in message.documents_json),
        template_kwargs=_object_from_json(kwargs, "template_kwargs_json") if kwargs else {},
        add_generation_prompt=begins,
        continue_final_message=continues,
        parse_special=parse_special,
    )


def _tool_from_pb(message: inference_pb2.Tool) -> Tool:
    schema = message.parameters_json
    return Tool(
        name=message.name,
        description=message.description or None,
        parameters=_object_from_json(schema, "tools.parameters_json") if schema else None,
        strict=message.strict,
    )


def _tool_choice_from_pb(message: inference_pb2.ChatInput) -> ToolChoice:
    name = message.tool_choice_name
    said = message.tool_choice or (ToolUse.REQUIRED if name else ToolUse.AUTO)
    if said not in tuple(ToolUse) or (name and said != ToolUse.REQUIRED):
        raise InvalidRequest(
            "tool_choice must be auto, none or required, and required with tool_choice_name", "tool_choice"
        )
    is_parallel = message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True
    return ToolChoice(use=ToolUse(said), name=name, is_parallel=is_parallel)


def _chat_message_from_pb(message: inference_pb2.ChatMessage, index: int) -> ChatMessage:
    content, parts = _content_from_pb(message, index) if message.parts else (message.content, ())
    read = ChatMessage(
        role=message.role,
        content=content,
        parts=parts,
        name=message.name,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
        tool_calls=tuple(
            tool_call(call_id=call.id, name=call.name, arguments=call.arguments_json) for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
    )
    read.check(index)
    return read


def _content_from_pb(message: inference_pb2.ChatMessage, index: int) -> tuple[str, tuple[str | bytes, ...]]:
    where = f"messages[{index}]"
    if message.content:
        raise InvalidRequest(f"{where} has both content and parts; set one of them", f"{where}.parts")
    parts: list[str | bytes] = []
    for place, part in enumerate(message.parts):
        match part.WhichOneof("part"):
            case "text":
                parts.append(part.text)
            case "image":
                check_image(part.image, f"{where}.parts[{place}].image")
                parts.append(part.image)
            case None:
                raise InvalidRequest(f"{where}.parts[{place}] is empty; set its text or its image", f"{where}.parts")
    return content_of(parts)


def _object_from_json(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"chat.{name} is not valid JSON: {error}", name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"chat.{name} must be a JSON object", name)
    return value


def _truncation_from_pb(message: inference_pb2.GenerateRequest) -> api.Truncation | None:
    side = message.truncation_side or api.TruncationSide.LEFT
    if side not in tuple(api.TruncationSide):
        raise InvalidRequest(f"truncation_side must be left or right; got {side[:16]!a}", "truncation_side")
    if message.HasField("truncate_prompt_tokens"):
        return api.Truncation(message.truncate_prompt_tokens, api.TruncationSide(side))
    if message.truncation_side:
        raise InvalidRequest("truncation_side belongs to truncate_prompt_tokens; set that too", "truncation_side")
    return None
