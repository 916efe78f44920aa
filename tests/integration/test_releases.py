"""Workers of three releases in one cluster: an older one, this one, and one that is still to come. No request fails.

The older one does not know `min_p`: its lease does not list the field, and it refuses a command that has it. The next
one knows more fields than this release, and puts them into all that it says to routers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from google.protobuf.message import Message

from baton import messages, wire
from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from baton.v1 import worker_pb2
from baton.wire import worker as wire_worker
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.asking import prompt_of, sampling
from tests.support.load import Stream

MIN_P = "SamplingParams.5"
FIELD_99 = b"\x98\x06\x01"
PATIENT = {"default": SloClassConfig(ttft_ms=600_000)}
"""However slow the machine, no request is refused because it would be late."""
NUM_ROUNDS = 12
AT_ONCE = 6


def become_older() -> None:
    """Makes this worker's process one of a release before `min_p`."""
    wire.KNOWN_FIELDS = wire.KNOWN_FIELDS.replace("SamplingParams:1,2,3,4,5,6,", "SamplingParams:1,2,3,4,6,")
    known_here = wire.unknown_field

    def unknown(message: Message) -> str:
        return "sampling.5" if MIN_P in wire.fields_in(message) else known_here(message)

    setattr(wire_worker, "unknown_field", unknown)  # noqa: B010 # by the name that the module itself calls


def become_next() -> None:
    """Makes this worker's process one of a release to come."""
    wire.KNOWN_FIELDS = "Later:1,2 " + wire.KNOWN_FIELDS.replace("SamplingParams:", "SamplingParams:99,")
    serve_response = wire.serve_response

    def with_more(events: Iterable[tuple[int, messages.Event]]) -> worker_pb2.ServeResponse:
        response = serve_response(events)
        for event in response.events:
            for message in (event, getattr(event, event.WhichOneof("event") or "", response)):
                message.MergeFromString(FIELD_99)
        return response

    wire.serve_response = with_more


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running_fleet(
        TransferConfig(transports=("tcp",)), RouterConfig(mode="disaggregated", slo_classes=PATIENT), num_routers=2
    ) as fleet:
        yield fleet


def test_no_request_fails_where_workers_are_of_three_releases(fleet: Fleet) -> None:
    of = {
        fleet.add(role, prepare=prepare): name
        for role in (Role.PREFILL, Role.DECODE)
        for name, prepare in (("older", become_older), ("this", None), ("next", become_next))
    }
    fleet.wait_for(*of)
    seeds = itertools.count()
    served: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for number in range(NUM_ROUNDS):
        has_min_p = bool(number % 2)
        fields = {"sampling": sampling(12, **({"min_p": 0.5} if has_min_p else {}))}
        streams = [
            Stream(inference=router.inference, prompt=prompt_of(next(seeds), 100), max_tokens=12, fields=fields)
            for router, _ in zip(itertools.cycle(fleet.routers), range(AT_ONCE), strict=False)
        ]
        for stream in streams:
            stream.start()
        for stream in streams:
            timing = stream.served().timing
            assert timing.retries == 0, "nobody was asked for what it does not know"
            served[has_min_p][of[timing.prefill_worker], of[timing.decode_worker]] += 1
    assert not [pair for pair in served[True] if "older" in pair], "it does not know min_p"
    assert {name for pair in served[True] for name in pair} == {"this", "next"}
    assert {name for pair in served[False] for name in pair} == {"older", "this", "next"}
    assert any(len(set(pair)) > 1 for pair in served[False]), "KV goes from one release to another"
