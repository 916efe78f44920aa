"""Messages between a worker and its host arrive as they were sent, whatever way a stream of bytes is cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.sampling import EarlyStopping, SamplingParams
from baton.structure import StructuredOutputs
from engine.vllm.messages import (
    HEAD_BYTES,
    Abort,
    Add,
    Adopt,
    Allocated,
    Budget,
    Channel,
    Counts,
    Failed,
    Group,
    Insert,
    KvMemory,
    LayerDone,
    Lost,
    Message,
    Ping,
    Pinned,
    PinPrefix,
    Pong,
    Progress,
    Ready,
    Start,
    Stepped,
    StoredBlock,
    Unpin,
    decoded,
    encoded,
    length_of,
    params_of,
    values_of,
)

READY = Ready(
    version="0.33.0",
    groups=[Group("full", 2, 32, 0), Group("window", 4, 32, 1024)],
    num_blocks=64,
    max_model_len=512,
    max_num_batched_tokens=128,
    vocab_size=49152,
    device="NVIDIA H200",
    dtype="bfloat16",
    kv_dtype="auto",
    attention="flash_attn",
    quantization="awq",
    caches_prefixes=True,
    memory=KvMemory(2, 65, 128, "float32", [1, 2]),
    tag="vllm cpu_attn",
)
MESSAGES: list[Message] = [
    Start({"model": "/m", "max_model_len": -1, "compilation_config": {"mode": 3}}, [0, 2], {"dtype": "float32"}),
    READY,
    READY._replace(memory=None, groups=[]),
    Add(7, [1, 2, 3], 2, 5, [0], 1, "ab" * 16, {"temperature": 0.5, "logit_bias": [[3, 1.5]]}, "generate"),
    Abort(7),
    Insert(7, -1, 48),
    Adopt(7, 32),
    PinPrefix(1, ["aa", "bb"], 12, [1, 2], "00"),
    Pinned(1, [4, 5], 1),
    Unpin(1),
    Allocated(7, [3, 9], -1),
    LayerDone(1, [(7, 64)]),
    Budget(64),
    Ping(),
    Pong(),
    Stepped(
        took_s=0.25,
        size=(3, 4, 1, 99),
        progress=[Progress(7, [5, 6], "stop", 16, [[(5, -0.5), (5, -0.5), (8, -1.5)]], [])],
        stored=[StoredBlock("aa", "", list(range(32)), "00"), StoredBlock("bb", "aa", [1], "")],
        removed=["cc"],
        ends=[(7, 64)],
        counts=Counts(60, 3, 0, 4),
    ),
    Failed(-1, "it cannot: “é”\n\0"),
    Lost("a step has failed"),
]


def plain(value: Any) -> Any:
    """Sequences of all kinds are alike in JSON."""
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    sent = encoded(message)
    assert length_of(sent[:HEAD_BYTES]) == len(sent) - HEAD_BYTES
    received = decoded(sent[HEAD_BYTES:])
    assert type(received) is type(message)
    assert plain(received) == plain(message)


def test_parts_of_a_message_have_their_types_again() -> None:
    for message in MESSAGES:
        received = decoded(encoded(message)[HEAD_BYTES:])
        if isinstance(received, Stepped):
            assert (received.counts.num_named, received.progress[0].finish, received.stored[1].before) == (
                4,
                "stop",
                "aa",
            )
        elif isinstance(received, Ready) and received.groups:
            assert received.groups[1].window == 1024
            assert received.memory is not None
            assert received.memory.probe == [1, 2]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"3",
        b"[]",
        b'"Ping"',
        b'["Pang"]',
        b'["Ping",1]',
        b'["Stepped",1,[],[3],[],[],[],[]]',
        b"[[]]",
        b"{",
    ],
)
def test_what_is_not_a_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="is not a message"):
        decoded(body)


def test_an_error_shows_only_the_beginning_of_what_is_not_a_message() -> None:
    with pytest.raises(ValueError, match="is not a message") as refused:
        decoded(b"a" * 100_000)
    assert len(str(refused.value)) < 300


def test_several_messages_in_one_read_come_one_after_the_other(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(b"".join(map(encoded, MESSAGES)))
    assert [type(message) for message in channel.receive()] == [type(message) for message in MESSAGES]
    assert list(channel.receive(0.0)) == [], "there is no other one, and it did not wait"
    assert list(channel.receive(0.01)) == []


@given(st.data())
def test_messages_that_arrive_in_pieces_are_put_together(data: st.DataObject) -> None:
    sent = [MESSAGES[1], MESSAGES[3], Ping()]
    whole = b"".join(map(encoded, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, received = Channel(ours), list[Message]()
        for begin, end in pairwise([0, *cuts, len(whole)]):
            theirs.sendall(whole[begin:end])
            received += channel.receive(0.0)
            there = b"".join(map(encoded, received))
            assert whole.startswith(there)
            assert len(there) <= end
    assert plain(received) == plain(sent)


def test_a_message_larger_than_the_sockets_buffer_is_sent_and_received(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    large = Add(1, list(range(1 << 20)), 1 << 20, 1, [], 0, "", {}, "generate")

    def send() -> None:
        with contextlib.suppress(OSError):  # if the test fails, nobody reads
            Channel(other).send(large)

    sender = threading.Thread(target=send)
    sender.start()
    assert next(channel.receive()) == large
    sender.join()


def test_the_end_of_the_connection_comes_after_the_last_message(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(encoded(Ping()) + encoded(Budget(3))[:5])
    other.close()
    received = channel.receive()
    assert next(received) == Ping()
    with pytest.raises(EOFError):
        next(received)
    with pytest.raises(OSError, match="Broken pipe"):
        channel.send(Pong())


STRUCTURES = st.one_of(
    st.builds(StructuredOutputs, json=st.just('{"type": "object"}')),
    st.builds(StructuredOutputs, json_object=st.just(True)),
    st.builds(StructuredOutputs, regex=st.sampled_from(["[0-9]+", "a|b"])),
    st.builds(StructuredOutputs, choice=st.lists(st.text("abc é", min_size=1), min_size=1, max_size=4).map(tuple)),
    st.builds(StructuredOutputs, grammar=st.just('start: "a"')),
)
TOKENS = st.lists(st.integers(0, 49151), max_size=5).map(tuple)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.none() | st.integers(50, 99),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 50),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63) + 1, 2**63 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    "stop_token_ids": TOKENS,
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 20),
    "logprob_token_ids": TOKENS,
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "min_tokens": st.integers(0, 50),
    "repetition_penalty": st.floats(0.1, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
    "bad_words": st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    "bad_word_ids": st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    "allowed_token_ids": st.lists(st.integers(100, 49151), max_size=5).map(tuple),  # not those of bad words alone
    "typical_p": st.floats(0.01, 1),
    "dry_multiplier": st.floats(0, 4),
    "dry_sequence_breakers": st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    "dry_breaker_ids": TOKENS,
    "xtc_probability": st.floats(0, 1),
    "xtc_exempt_token_ids": TOKENS,
}
STRUCTURED = {"structured_outputs": STRUCTURES, "ignore_eos": st.just(False)}
REASONING: dict[str, st.SearchStrategy[Any]] = {
    "reasoning_end_ids": st.just((7, 8)),
    "reasoning_begin_id": st.none() | st.just(6),
    "thinking_budget": st.none() | st.integers(1, 99),
}
BEAMS: dict[str, st.SearchStrategy[Any]] = {
    "use_beam_search": st.just(True),
    "temperature": st.just(0.0),
    "beam_width": st.integers(2, 8),
    "length_penalty": st.floats(-2, 2),
    "early_stopping": st.sampled_from(EarlyStopping),
}
PARAMS = st.one_of(
    st.fixed_dictionaries({}, optional=VALUES),
    st.fixed_dictionaries(REASONING, optional=VALUES),
    st.fixed_dictionaries(STRUCTURED, optional={name: VALUES[name] for name in VALUES if name not in STRUCTURED}),
    st.fixed_dictionaries(BEAMS, optional={"max_tokens": VALUES["max_tokens"]}),
)


@given(PARAMS)
def test_sampling_parameters_are_the_same_in_the_host(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    message = Add(1, [1], 1, 1, [], 0, "", values_of(params), "generate")
    received = decoded(encoded(message)[HEAD_BYTES:])
    assert isinstance(received, Add)
    again = params_of(received.sampling)
    assert again == params
    assert hash(again) == hash(params), "lists became tuples again"
    assert isinstance(again.early_stopping, EarlyStopping)
    assert isinstance(again.structured_outputs, StructuredOutputs | None)


def test_only_parameters_that_are_set_are_sent() -> None:
    assert values_of(SamplingParams()) == {}
    assert values_of(SamplingParams(temperature=0.0, seed=0)) == {"temperature": 0.0, "seed": 0}
    named = {"n", "best_of", "top_p"} | VALUES.keys() | STRUCTURED.keys() | REASONING.keys() | BEAMS.keys()
    beside = {"include_stop_str_in_output", "skip_special_tokens", "dry_base", "dry_allowed_length", "dry_range"}
    assert {each.name for each in fields(SamplingParams)} == named | beside | {"xtc_threshold"}, (
        "a new field needs a strategy"
    )
