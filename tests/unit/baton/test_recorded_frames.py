"""What the last release wrote is read as what it meant: a worker, a router or a Redis of that release may be beside us.

`recorded_frames/VERSION.json` holds, by name, the bytes that the product of that version wrote: messages and headers in
hexadecimal, leases as text. What both sides work out for themselves, and must work out alike, is held as well. A file
is never written again; a new release adds one (`python -m tests.unit.baton.test_recorded_frames` writes it).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton import messages as m
from baton import wire
from baton.blocks import block_keys, cache_seed
from baton.cluster import (
    VERSION,
    BlockCounts,
    ControllerInfo,
    PoolScaling,
    Role,
    RouterInfo,
    TransferCounts,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.costs import StepCosts
from baton.kv_layout import GroupLayout, KvLayout, StateLayout
from baton.sampling import FinishReason, SamplingParams
from baton.v1 import kv_pb2, worker_pb2
from kvstore.leases import codec
from kvstore.transfer.protocol import chunk_header
from kvstore.transfer.protocol.plan import WireOptions, plan

FOLDER = Path(__file__).with_name("recorded_frames")
RELEASES = sorted(FOLDER.glob("*.json"))
SLOT_BYTES = 2**20
VERSION_AT = 4
"""Byte of a header that has the version of the KV transfer's protocol."""
OF_ONE_PROTOCOL = {"header of a chunk", "transfer hash", "plan digest", "plan digest of unequal layouts"}
"""Between workers of unequal protocol versions nothing of these is sent: they refuse each other's greeting."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A value, how this version writes it, and how it reads what was written."""

    value: Any
    write: Callable[[Any], str]
    read: Callable[[str], Any]


LAYOUT = KvLayout(
    32,
    2,
    (
        GroupLayout(name="full", layers=(0, 2), num_kv_heads=4, k_dim=64, v_dim=64, dtype="bfloat16"),
        GroupLayout(
            name="window", layers=(1, 3), num_kv_heads=2, k_dim=8, v_dim=4, dtype="float32", block_size=16,
            page_order="opaque", tag="engine/3",
        ),
    ),
    (StateLayout("conv", (4, 3), "float32"),),
)  # fmt: skip
OTHER_LAYOUT = KvLayout(
    16, 1, (GroupLayout(name="full", layers=(0, 1, 2), num_kv_heads=4, k_dim=64, v_dim=64, dtype="float16"),)
)
TICKET = m.Ticket(
    transfer_id="r-1/0/2",
    generation=2**40 + 7,
    decode_worker_id="decode-3",
    incarnation="00ff00ff00ff00ff",
    kv_address="[fd00::1]:7001",
    num_tokens=700,
    skip_tokens=64,
    wire_compat="5e" * 16,
    layout=LAYOUT,
    force_first_token=True,
)
SPEC = m.SequenceSpec(
    request_id="r-1",
    choice_index=1,
    token_ids=(1, 127, 128, 49151, 7),
    num_prompt_tokens=3,
    sampling=SamplingParams(
        max_tokens=20, temperature=0.5, top_k=16, top_p=0.75, min_p=0.25, seed=-(2**62), stop_token_ids=(2, 3),
        ignore_eos=True,
    ),
    cache_seed=bytes(range(16)),
    attempt=2,
    priority=-3,
    ttft_s=1.5,
    itl_s=0.125,
    num_expected_tokens=64,
)  # fmt: skip
SOURCE = m.PrefixSource(worker_id="prefill-1", address="10.0.0.1:7001", num_tokens=640)
REPORT = m.PrefillReport(
    num_cached_tokens=64, queue_s=0.25, prefill_s=0.5, num_pulled_tokens=32, pull_s=0.125, room_s=0.0625
)
WORKER = Worker(
    WorkerInfo(
        id="decode-3", role=Role.DECODE, address="10.0.0.3:7001", pid=42, node="n-1", epoch=1_790_000_000_123,
        content_id="c0" * 16, wire_compat="5e" * 16, block_size=32, max_model_len=8192, chunk_tokens=256,
        version="0.1.0", known_fields="SequenceSpec:1,2,3", engine="arithmetic", sampler="baton/1",
    ),
    WorkerLoad(
        state=WorkerState.DRAINING, running=3, waiting=2, queued_tokens=900, blocks=BlockCounts(10, 4, 3, 3),
        self_check="block 7 is lost",
        transfers=TransferCounts(sent_committed=5, received_failed=1, resent=2, sent_bytes=2**41, transfer_s=1.5),
        preemptions=6,
        costs=StepCosts(
            s_overhead=0.5, s_per_token=0.25, s_per_pair=0.125, s_weights=0.75, s_per_sequence=0.5, s_per_kv_token=0.25
        ),
        busy_s=12.5, computed_tokens=12345,
    ),
)  # fmt: skip
ROUTER = RouterInfo(
    id="router-1", pid=43, grpc="10.0.0.9:7000", http="10.0.0.9:8000", mirror_lag_s=0.25, met=7, missed=1, rejected=2,
    version="0.1.0",
)  # fmt: skip
CONTROLLER = ControllerInfo(
    pid=44, address="10.0.0.8:7002", scaling=(PoolScaling("prefill", 0.75, 3),), version="0.1.0"
)
HEADER = chunk_header.Header(
    flags=chunk_header.CHECKED, epoch=3, place=17, next_bytes=4096, generation=2**40 + 7,
    transfer=chunk_header.transfer_hash("r-1/0/2"), seq=5, part=1, layer_lo=2, layer_hi=4, unit_lo=6, unit_hi=9,
    num_bytes=12_288, checksum=2**63 + 1,
)  # fmt: skip
IDS = ("r-1/0/2", 2**40 + 7)


def _to_receiver(message: m.FromSender) -> Frame:
    return Frame(
        message,
        lambda value: wire.session_request(value).SerializeToString().hex(),
        lambda text: wire.session_request_from_pb(kv_pb2.SessionRequest.FromString(bytes.fromhex(text))),
    )


def _to_sender(message: m.FromReceiver) -> Frame:
    return Frame(
        message,
        lambda value: wire.session_response(value).SerializeToString().hex(),
        lambda text: wire.session_response_from_pb(kv_pb2.SessionResponse.FromString(bytes.fromhex(text))),
    )


def _command(call: m.StartCall | m.CancelCall) -> Frame:
    def write(call: m.StartCall | m.CancelCall) -> str:
        command = wire.start_command(call) if isinstance(call, m.StartCall) else wire.cancel_command(call)
        return wire.serve_request([command]).SerializeToString().hex()

    return Frame([call], lambda calls: write(calls[0]), lambda text: wire.commands(
        worker_pb2.ServeRequest.FromString(bytes.fromhex(text))
    ))  # fmt: skip


def _events(*events: m.Event) -> Frame:
    return Frame(
        list(enumerate(events, start=1)),
        lambda value: wire.serve_response(value).SerializeToString().hex(),
        lambda text: wire.events(worker_pb2.ServeResponse.FromString(bytes.fromhex(text))),
    )


def _agreed(value: str) -> Frame:
    """What nobody sends, since both sides work it out: it is recorded as it is."""
    return Frame(value, str, str)


def _lease(worker: Worker) -> str:
    return json.dumps([codec.encode(worker.info), codec.encode(worker.load)])


def _leased(text: str) -> Worker:
    info, load = json.loads(text)
    return Worker(codec.decode_info(info.encode()), codec.decode_load(load.encode()))


FRAMES = {
    "hello": _to_receiver(
        m.Hello(
            protocol_version=4, worker_id="prefill-1", incarnation="ff00", wire_compat="5e" * 16,
            transports=("shm", "tcp"), layout=LAYOUT, rank=1, peer_rank=0, host_id="host",
        )
    ),
    "rendezvous": _to_receiver(m.Rendezvous("tcp", b"\0\xff 10.0.0.1 7")),
    "offer": _to_receiver(
        m.Offer(
            transfer_id=IDS[0], generation=IDS[1], plan_digest=bytes(range(16)), num_chunks=9, wire_dtype="bfloat16",
            num_tokens=700, chunk_bytes=2**20,
        )
    ),
    "commit": _to_receiver(m.Commit(*IDS, 0)),
    "commit without a token": _to_receiver(m.Commit(*IDS, None)),
    "abort": _to_receiver(m.Abort(*IDS, "TransferTimeout: too late")),
    "ping of the sender": _to_receiver(m.Ping()),
    "welcome": _to_sender(m.Welcome("00ff", "tcp", 3)),
    "rendezvous of the receiver": _to_sender(m.Rendezvous("tcp/joined", b"")),
    "link ready": _to_sender(m.TransportReady()),
    "grant": _to_sender(m.Grant(*IDS)),
    "commit ack": _to_sender(m.CommitAck(*IDS)),
    "nack": _to_sender(m.Nack(*IDS, "TransferRefused: the two sides do not fit")),
    "abort ack": _to_sender(m.AbortAck(*IDS)),
    "ping of the receiver": _to_sender(m.Ping()),
    "session failed": _to_sender(m.SessionFailed("protocol 3 here, 4 there")),
    "pull": Frame(
        m.Pull(TICKET, (b"k" * 16, b"l" * 16)),
        lambda value: wire.pull_to_pb(value).SerializeToString().hex(),
        lambda text: wire.pull_from_pb(kv_pb2.PullRequest.FromString(bytes.fromhex(text))),
    ),
    "prefill": _command(m.StartCall(7, m.PrefillRequest(SPEC, TICKET, SOURCE), {"traceparent": "00-ab-cd-01"})),
    "prefill that stays": _command(m.StartCall(8, m.PrefillRequest(SPEC, None), {})),
    "decode": _command(m.StartCall(9, m.DecodeRequest(SPEC, await_kv=True), {})),
    "fetch": _command(m.StartCall(10, m.FetchRequest(SPEC.prefix(3), SOURCE), {})),
    "cancel": _command(m.CancelCall(9)),
    "events": _events(
        TICKET,
        m.FirstToken(0, FinishReason.LENGTH, REPORT),
        m.FirstToken(None, None, m.PrefillReport()),
        m.Transferred(2**33, 12, 0.5, 0.25),
        m.NewTokens(token_ids=(5, 300, 49151), finish_reason=None, report=REPORT),
        m.NewTokens(token_ids=(), finish_reason=FinishReason.STOP),
        m.Fetched(64),
        m.Migrate(),
        m.Failed("Overloaded", "no room", 1.5),
        m.CallEnded(),
    ),
    "header of a chunk": Frame(
        HEADER,
        lambda header: header.pack().hex(),
        lambda text: chunk_header.unpack(bytes.fromhex(text), HEADER.epoch, HEADER.place, HEADER.num_bytes, SLOT_BYTES),
    ),
    "lease of a worker": Frame(WORKER, _lease, _leased),
    "lease of a router": Frame(ROUTER, codec.encode, lambda text: codec.decode_router(text.encode())),
    "lease of the controller": Frame(CONTROLLER, codec.encode, lambda text: codec.decode_controller(text.encode())),
    "transfer hash": _agreed(chunk_header.transfer_hash("r-1/0/2").hex()),
    "plan digest": _agreed(
        plan(LAYOUT, 1, LAYOUT, 1, 700, (64, 64), WireOptions(2**16, 512, "auto")).digest("xxh3").hex()
    ),
    "plan digest of unequal layouts": _agreed(
        plan(OTHER_LAYOUT, 0, OTHER_LAYOUT, 0, 99, (16,), WireOptions(2**14, 32, "int8")).digest("off").hex()
    ),
    "block keys": _agreed(
        b"".join(block_keys(cache_seed("bb8d0ffcac63f89b487a19c943f89017", b"secret", "acme"), range(70), 32)).hex()
    ),
}  # fmt: skip


def test_the_last_release_is_recorded() -> None:
    assert f"{VERSION}.json" in {file.name for file in RELEASES}, "a new release records its frames"


@pytest.mark.parametrize("release", RELEASES, ids=lambda file: file.stem)
def test_what_a_release_wrote_is_read_as_what_it_meant(release: Path) -> None:
    recorded = json.loads(release.read_text())
    assert recorded.keys() <= FRAMES.keys(), "what was written once is read for ever"
    if bytes.fromhex(recorded["header of a chunk"])[VERSION_AT] != chunk_header.PROTOCOL_VERSION:
        recorded = {name: text for name, text in recorded.items() if name not in OF_ONE_PROTOCOL}
    read = {name: FRAMES[name].read(text) for name, text in recorded.items()}
    assert read == {name: FRAMES[name].value for name in recorded}


def test_every_frame_is_recorded_in_a_release() -> None:
    names = {name for release in RELEASES for name in json.loads(release.read_text())}
    assert names == FRAMES.keys()


if __name__ == "__main__":
    with (FOLDER / f"{VERSION}.json").open("x") as file:
        json.dump({name: frame.write(frame.value) for name, frame in FRAMES.items()}, file, indent=1)
        file.write("\n")
