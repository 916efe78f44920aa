"""Requests as they should be, by the path or the method that they go to: each is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from baton.v1 import admin_pb2, inference_pb2

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}}}
_TOOL = {"name": "weather", "description": "Says what the sky does.", "parameters": _SCHEMA}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
_SAMPLING = {"max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "top_k": 8, "min_p": 0.01, "seed": 3}
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Is it 🌧 in Bern?"}, {"type": "text", "text": "Or not?"}]},
]
_HISTORY = [
    *_CHAT,
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
]
_CLAUDES_TOOL = {"name": "weather", "description": "Says what the sky does.", "input_schema": _SCHEMA}
_CLAUDES_CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Is it dry in Bern?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "dry"}]},
            {"type": "text", "text": "So?"},
        ],
    },
]
_RESPONSES_TOOL = {"type": "function", **_TOOL, "strict": False}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Is it dry in Bern?"}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bern"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "dry"},
    {"type": "message", "role": "user", "content": "So?"},
]

BODIES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {"messages": _CHAT, **_SAMPLING, "stop": ["xyz"], "n": 2, "stream": True, "stream_options": {}},
        {"messages": _CHAT, "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -1.0}},
        {"messages": _HISTORY, "max_tokens": 8, "tools": [{"type": "function", "function": _TOOL}], "user": "u"},
        {
            "messages": _CHAT,
            "max_tokens": 30,
            "tools": [{"type": "function", "function": {**_TOOL, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
        },
        {
            "messages": [*_CHAT, {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
            "max_tokens": 20,
            "response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": _SCHEMA}},
        },
        {"messages": _CHAT, "max_tokens": 5, "structured_outputs": {"regex": "[a-z]{2,4}"}, "slo": {"ttft_ms": 6e5}},
    ),
    "/v1/completions": (
        {"prompt": "The capital of France is", **_SAMPLING, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"prompt": ["one", "two"], "max_tokens": 3, "n": 2, "best_of": 3, "echo": True, "logprobs": 1},
        {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "ignore_eos": True, "bad_words": ["the"], "min_tokens": 2},
        {"prompt": [5, 6, 7], "max_tokens": 4, "use_beam_search": True, "beam_width": 3, "early_stopping": "never"},
        {"prompt": "a b a b", "max_tokens": 4, "dry_multiplier": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"prompt": "long " * 40, "max_tokens": 4, "truncate_prompt_tokens": 8, "truncation_side": "right"},
        {"prompt": "hi", "max_tokens": 4, "prompt_logprobs": 1, "allowed_token_ids": [5, 6], "stop_token_ids": [9]},
    ),
    "/tokenize": (
        {"prompt": "Grüße 🌧", "add_special_tokens": False, "return_token_strs": True},
        {"messages": _HISTORY, "tools": [{"type": "function", "function": _TOOL}], "add_generation_prompt": True},
    ),
    "/detokenize": ({"tokens": [1, 2, 300, 49151]},),
    "/v1/messages": (
        {
            "model": "smollm2-135m-instruct",
            "max_tokens": 8,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": _CLAUDES_CHAT,
            "tools": [_CLAUDES_TOOL],
            "tool_choice": {"type": "auto"},
        },
        {
            "model": "smollm2-135m-instruct",
            "max_tokens": 30,
            "messages": [{"role": "user", "content": "Is it dry?"}],
            "tools": [_CLAUDES_TOOL],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "metadata": {"user_id": "u"},
        },
        {
            "model": "smollm2-135m-instruct",
            "max_tokens": 6,
            "messages": [{"role": "user", "content": "hi"}],
            "system": "Be brief.",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "stop_sequences": ["xyz"],
        },
    ),
    "/v1/messages/count_tokens": (
        {"model": "smollm2-135m-instruct", "messages": _CLAUDES_CHAT, "tools": [_CLAUDES_TOOL], "system": "Be brief."},
    ),
    "/v1/responses/input_tokens": ({"input": _ITEMS, "tools": [_RESPONSES_TOOL], "instructions": "Be brief."},),
    "/v1/responses": (
        {"input": "Is it dry in Bern?", "instructions": "Be brief.", "max_output_tokens": 6, "temperature": 0.5},
        {"input": _ITEMS, "tools": [_RESPONSES_TOOL], "max_output_tokens": 8, "store": False, "top_p": 0.9},
        {
            "input": [{"role": "user", "content": "hi"}],
            "tools": [_RESPONSES_TOOL],
            "tool_choice": {"type": "function", "name": "weather"},
            "max_output_tokens": 30,
        },
        {
            "input": "hi",
            "max_output_tokens": 30,
            "text": {"format": {"type": "json_schema", "name": "sky", "schema": _SCHEMA, "strict": False}},
        },
    ),
}
"""Those of a path that a release does not serve are not sent. Where a path streams, `stream` can be set to true."""

_MESSAGES = [
    inference_pb2.ChatMessage(role="system", content="Be brief."),
    inference_pb2.ChatMessage(role="user", content="Is it 🌧 in Bern?", name="u"),
    inference_pb2.ChatMessage(
        role="assistant",
        reasoning="Hm.",
        tool_calls=[inference_pb2.ToolCall(id="c", name="weather", arguments_json='{"city": "Bern"}')],
    ),
    inference_pb2.ChatMessage(role="tool", content="dry", tool_call_id="c"),
]
_PB_TOOL = inference_pb2.Tool(
    name="weather",
    description="Says what the sky does.",
    parameters_json='{"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}',
)
_GENERATED: tuple[Message, ...] = (
    inference_pb2.GenerateRequest(
        text="The capital of France is",
        sampling=inference_pb2.SamplingParams(max_tokens=6, temperature=0.5, top_k=8, n=2, stop=["xyz"], logprobs=1),
        slo=inference_pb2.ServiceLevelObjective(ttft_ms=6e5, itl_ms=6e5),
        stream_options=inference_pb2.StreamOptions(skip_text=True),
        truncate_prompt_tokens=100,
        truncation_side="right",
        add_special_tokens=False,
    ),
    inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatInput(messages=_MESSAGES, tools=[_PB_TOOL], tool_choice="auto"),
        sampling=inference_pb2.SamplingParams(max_tokens=8, seed=3, logit_bias={5: -1.0}),
        parse_special=True,
    ),
    inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatInput(
            messages=_MESSAGES[:2], tools=[_PB_TOOL], tool_choice_name="weather", parallel_tool_calls=False
        ),
        sampling=inference_pb2.SamplingParams(max_tokens=30),
        stream_options=inference_pb2.StreamOptions(skip_reasoning=True),
    ),
    inference_pb2.GenerateRequest(
        request_id="resumed",
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=inference_pb2.SamplingParams(
            max_tokens=6,
            bad_word_ids=[inference_pb2.TokenIds(ids=[8, 9])],
            structured_outputs=inference_pb2.StructuredOutputs(regex="[a-z]{2,9}"),
            reasoning_end_ids=[44],
            thinking_budget=3,
        ),
        resume_from={0: 2},
    ),
    inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=inference_pb2.SamplingParams(max_tokens=4, use_beam_search=True, beam_width=3, length_penalty=0.5),
    ),
    inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=inference_pb2.SamplingParams(
            max_tokens=5,
            prompt_logprobs=1,
            best_of=3,
            dry_multiplier=0.5,
            xtc_probability=0.5,
            allowed_token_ids=[5, 6],
        ),
    ),
)
MESSAGES: Mapping[str, tuple[Message, ...]] = {
    "/baton.v1.Inference/Generate": _GENERATED,
    "/baton.v1.Inference/Tokenize": (
        inference_pb2.TokenizeRequest(text="Grüße 🌧", add_special_tokens=False),
        inference_pb2.TokenizeRequest(chat=inference_pb2.ChatInput(messages=_MESSAGES, tools=[_PB_TOOL])),
    ),
    "/baton.v1.Inference/ListModels": (inference_pb2.ListModelsRequest(),),
    "/baton.v1.Admin/Explain": (admin_pb2.ExplainRequest(request_id="resumed"),),
    "/baton.v1.Admin/ListRequests": (admin_pb2.ListRequestsRequest(tenant="a", outcomes=["met"], limit=5),),
    "/baton.v1.Admin/GetStatus": (admin_pb2.GetStatusRequest(),),
}
"""What a client may call without an operator's key."""
