"""The router's state machine in virtual time: the life of one request as text, also when its worker leaves.

A line is an event of the machine, with its time, and after the arrow what the machine did then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from textwrap import dedent

import pytest

from baton.cluster import Role, WorkerState
from baton.messages import FirstToken, NewTokens
from lab.simulate.policy import RoutingDecision
from lab.simulate.worker import WorkerShape
from lab.simulate.world import World
from lab.traces.trace import Trace
from router.serve.machine import CallFailed, ChoiceMachine, Event, Placed, Step
from tests.unit.lab.simulate.test_world import COSTS, Fixed, request, shape, trace
from tests.unit.router.serve import test_machine


def in_words(event: Event) -> str:
    match event:
        case Placed(placement):
            return f"placed {placement.prefill_worker} {placement.decode_worker}".replace("  ", " ")
        case FirstToken(token_id):
            return f"first {token_id}".lower()
        case NewTokens():
            return " ".join(("tokens", *map(str, event.token_ids)))
        case CallFailed(source, failed, error):
            return f"{source} {failed.info.id}: {error}"
    return type(event).__name__.lower()


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run, and the life of its last request. The others may migrate as well."""

    requests: Trace
    decisions: tuple[RoutingDecision, ...]
    pools: tuple[int, int]
    """Numbers of prefill and decode workers."""
    leaves: Mapping[int, float] = field(default_factory=dict)
    """Times at which workers, by index, are ordered to take the other role."""
    of: WorkerShape = field(default_factory=shape)
    num_moved: int = 0
    life: str


def life(story: Story) -> tuple[World, str]:
    (prefill, decode), placer = story.pools, Fixed(*story.decisions)
    world = World(story.requests, placer, story.of, COSTS, prefill=prefill, decode=decode)
    for worker, at_s in story.leaves.items():
        member = world.members.all[worker]
        then = Role.DECODE if member.role is Role.PREFILL else Role.PREFILL
        world.clock.at(at_s, lambda member=member, then=then: world.leave(member, then))  # type: ignore[misc]
    lives: dict[int, tuple[ChoiceMachine, list[str]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        on = ChoiceMachine.on

        def recorded(self: ChoiceMachine, event: Event) -> Step:
            step = on(self, event)
            line = f"{world.now:.2f} {in_words(event)} -> {test_machine.trace(self, step)}"
            line = re.sub(r"[0-9]{6,}", lambda number: str(int(number[0]) % 2**18), line)  # see `spec_of`
            lives.setdefault(id(self), (self, []))[1].append(line)
            return step

        patch.setattr(ChoiceMachine, "on", recorded)
        served = world.run()
    assert all(one.finished_s < float("inf") for one in served)
    assert all(worker.engine.is_idle and not worker.num_requests for worker in world.workers)
    assert not any(member.num_awaited or member.state is WorkerState.DRAINING for member in world.members.all)
    *_, (_, lines) = lives.values()
    return world, "\n".join(lines)


def at(computes: int, decodes: int, **how: int) -> RoutingDecision:
    return RoutingDecision(computes=computes, decodes=decodes, **how)


ONE = trace(request(0.0, 20, 4))
QUEUE = trace(request(0.0, 60, 2), request(0.5, 20, 3, 9))
"""The second prompt waits until the first one is computed."""
FULL, SMALL = trace(request(0.0, 48, 30), request(0.5, 40, 3, 9)), shape(num_blocks=6)
"""There is no room for both at the same time."""
TIGHT, SCARCE = trace(request(0.0, 40, 40), request(0.5, 40, 12, 9)), replace(shape(num_blocks=7), output_reservation=8)
"""The second response is preempted."""
CHUNKS = replace(SCARCE, max_num_batched_tokens=16)
STORIES = {
    "aggregated": Story(
        requests=ONE, decisions=(at(0, 0),), pools=(0, 1), life="""
        0.00 begun -> placing: find place
        0.00 placed 0 -> computing: open decode; await decode
        3.00 tokens 20 -> decoding: has kv, computed, emit 20; await decode
        6.30 tokens 21 22 23 -> ended: emit 21 22 23., leave calls; end
        """),
    "disaggregated": Story(
        requests=ONE, decisions=(at(0, 1),), pools=(1, 1), life="""
        0.00 begun -> placing: find place
        0.00 placed 0 1 -> reserving: open decode for kv; await decode
        0.00 ticket -> prefilling: open prefill; await prefill decode
        3.00 first 20 -> transferring: computed, emit 20; await decode prefill
        3.25 tokens -> decoding: has kv; await decode prefill
        3.25 transferred -> decoding: note transfer; await decode
        6.55 tokens 21 22 23 -> ended: emit 21 22 23., leave calls; end
        """),
    "the first token is the last": Story(
        requests=trace(request(0.0, 20, 1)), decisions=(at(0, 1),), pools=(1, 1), life="""
        0.00 begun -> placing: find place
        0.00 placed 0 1 -> reserving: open decode for kv; await decode
        0.00 ticket -> prefilling: open prefill; await prefill decode
        3.00 first 20 -> ended: computed, emit 20., leave calls; end
        """),
    "the prefill worker pulls a prefix": Story(
        requests=trace(request(0.0, 48, 1), request(90.0, 58, 2)),
        decisions=(at(1, 1), at(0, 2, source=1, source_tokens=48)), pools=(1, 2), life="""
        90.00 begun -> placing: find place
        90.00 placed 0 2 -> reserving: open decode for kv; await decode
        90.00 ticket -> prefilling: open prefill; await prefill decode
        98.25 first 58 -> transferring: computed, emit 58; await decode prefill
        103.75 tokens -> decoding: has kv; await decode prefill
        103.75 transferred -> decoding: note transfer; await decode
        104.85 tokens 59 -> ended: emit 59., leave calls; end
        """),
    "a prompt waits where it is computed and decoded": Story(
        requests=QUEUE, decisions=(at(0, 0), at(0, 0), at(1, 1)), pools=(0, 2), leaves={0: 1.0}, num_moved=1, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 -> computing: open decode; await decode
        7.00 migrate -> placing: leave calls, the decode worker leaves; find place
        7.00 placed 1 -> computing: open decode; await decode
        10.00 tokens 20 -> decoding: has kv, computed, emit 20; await decode
        12.20 tokens 21 22 -> ended: emit 21 22., leave calls; end
        """),
    "the decode worker has no room": Story(
        requests=FULL, decisions=(at(1, 1), at(0, 1), at(0, 2)), pools=(1, 2), leaves={1: 10.0}, of=SMALL,
        num_moved=1, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 1 -> reserving: open decode for kv; await decode
        10.20 migrate -> placing: leave calls, the decode worker leaves; find place
        10.20 placed 0 2 -> reserving: open decode for kv; await decode
        44.45 ticket -> prefilling: open prefill; await prefill decode
        49.45 first 40 -> transferring: computed, emit 40; await decode prefill
        49.70 tokens -> decoding: has kv; await decode prefill
        49.70 transferred -> decoding: note transfer; await decode
        51.90 tokens 41 42 -> ended: emit 41 42., leave calls; end
        """),
    "the prefill worker leaves before it is called": Story(
        requests=FULL, decisions=(at(2, 2), at(0, 2), at(1, 2)), pools=(2, 1), leaves={0: 10.0}, of=SMALL, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 2 -> reserving: open decode for kv; await decode
        37.70 ticket -> prefilling: open prefill; await prefill decode
        37.70 prefill 0: 0 leaves its role -> placing: leave calls, 0 leaves; find place
        37.70 placed 1 2 -> reserving: open decode for kv; await decode
        37.70 ticket -> prefilling: open prefill; await prefill decode
        42.70 first 40 -> transferring: computed, emit 40; await decode prefill
        42.95 tokens -> decoding: has kv; await decode prefill
        42.95 transferred -> decoding: note transfer; await decode
        45.15 tokens 41 42 -> ended: emit 41 42., leave calls; end
        """),
    "the prefill worker leaves, and the prompt waits": Story(
        requests=QUEUE, decisions=(at(0, 2), at(0, 2), at(1, 2)), pools=(2, 1), leaves={0: 1.0}, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 2 -> reserving: open decode for kv; await decode
        0.50 ticket -> prefilling: open prefill; await prefill decode
        7.00 prefill 0: 0 leaves its role -> placing: leave calls, 0 leaves; find place
        7.00 placed 1 2 -> reserving: open decode for kv; await decode
        7.00 ticket -> prefilling: open prefill; await prefill decode
        10.00 first 20 -> transferring: computed, emit 20; await decode prefill
        10.25 tokens -> decoding: has kv; await decode prefill
        10.25 transferred -> decoding: note transfer; await decode
        12.45 tokens 21 22 -> ended: emit 21 22., leave calls; end
        """),
    "the decode worker leaves, and the prompt waits": Story(
        requests=QUEUE, decisions=(at(0, 1), at(0, 2), at(0, 1)), pools=(1, 2), leaves={2: 1.0}, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 2 -> reserving: open decode for kv; await decode
        0.50 ticket -> prefilling: open prefill; await prefill decode
        1.00 migrate -> placing: leave calls, the decode worker leaves; find place
        1.00 placed 0 1 -> reserving: open decode for kv; await decode
        1.00 ticket -> prefilling: open prefill; await prefill decode
        10.00 first 20 -> transferring: computed, emit 20; await decode prefill
        10.25 tokens -> decoding: has kv; await decode prefill
        10.25 transferred -> decoding: note transfer; await decode
        12.45 tokens 21 22 -> ended: emit 21 22., leave calls; end
        """),
    "the prefill worker leaves, and the prompt is computed": Story(
        requests=ONE, decisions=(at(0, 2),), pools=(2, 1), leaves={0: 1.0}, life="""
        0.00 begun -> placing: find place
        0.00 placed 0 2 -> reserving: open decode for kv; await decode
        0.00 ticket -> prefilling: open prefill; await prefill decode
        3.00 first 20 -> transferring: computed, emit 20; await decode prefill
        3.25 tokens -> decoding: has kv; await decode prefill
        3.25 transferred -> decoding: note transfer; await decode
        6.55 tokens 21 22 23 -> ended: emit 21 22 23., leave calls; end
        """),
    "the decode worker leaves, and the prompt is computed": Story(
        requests=ONE, decisions=(at(0, 1),), pools=(1, 2), leaves={1: 1.0}, num_moved=1, life="""
        0.00 begun -> placing: find place
        0.00 placed 0 1 -> reserving: open decode for kv; await decode
        0.00 ticket -> prefilling: open prefill; await prefill decode
        3.00 first 20 -> transferring: computed, emit 20; await decode prefill
        3.25 tokens -> decoding: has kv; await decode prefill
        3.25 transferred -> decoding: note transfer; await decode
        3.25 migrate -> decoding: leaves, prepare move; await decode migration
        3.25 fetched -> placing: note pull, keep old call, leave calls, go back; take the next worker
        3.25 placed 1 2 -> reserving: open decode for kv; await decode
        3.25 ticket -> prefilling: open prefill; await prefill decode
        3.25 first none -> transferring: computed; await decode prefill
        6.00 tokens -> decoding: has kv; await decode prefill
        6.00 transferred -> decoding: note transfer; await decode
        9.30 tokens 21 22 23 -> ended: emit 21 22 23., leave calls; end
        """),
    "the worker that computes and decodes leaves, and the prompt is computed": Story(
        requests=trace(request(0.0, 40, 3)), decisions=(at(0, 0),), pools=(0, 2), leaves={0: 1.0}, of=shape(batch=16),
        num_moved=1, life="""
        0.00 begun -> placing: find place
        0.00 placed 0 -> computing: open decode; await decode
        7.00 tokens 40 -> decoding: has kv, computed, emit 40; await decode
        7.00 migrate -> decoding: leaves, prepare move; await decode migration
        7.00 fetched -> placing: note pull, keep old call, leave calls, go back; take the next worker
        7.00 placed 0 1 -> reserving: open decode for kv; await decode
        7.00 ticket -> prefilling: open prefill; await prefill decode
        7.00 first none -> transferring: computed; await decode prefill
        12.25 tokens -> decoding: has kv; await decode prefill
        12.25 transferred -> decoding: note transfer; await decode
        14.45 tokens 41 42 -> ended: emit 41 42., leave calls; end
        """),
    "the prefill worker leaves, and a prefix is pulled": Story(
        requests=trace(request(0.0, 48, 1), request(90.0, 58, 2)),
        decisions=(at(2, 2), at(0, 3, source=2, source_tokens=48), at(1, 3)), pools=(2, 2), leaves={0: 91.0}, life="""
        90.00 begun -> placing: find place
        90.00 placed 0 3 -> reserving: open decode for kv; await decode
        90.00 ticket -> prefilling: open prefill; await prefill decode
        96.25 prefill 0: 0 leaves its role -> placing: leave calls, 0 leaves; find place
        96.25 placed 1 3 -> reserving: open decode for kv; await decode
        96.25 ticket -> prefilling: open prefill; await prefill decode
        103.05 first 58 -> transferring: computed, emit 58; await decode prefill
        103.75 tokens -> decoding: has kv; await decode prefill
        103.75 transferred -> decoding: note transfer; await decode
        104.85 tokens 59 -> ended: emit 59., leave calls; end
        """),
    "the decode worker leaves": Story(
        requests=trace(request(0.0, 20, 9)), decisions=(at(0, 0),), pools=(0, 2), leaves={0: 6.0}, num_moved=1, life="""
        0.00 begun -> placing: find place
        0.00 placed 0 -> computing: open decode; await decode
        3.00 tokens 20 -> decoding: has kv, computed, emit 20; await decode
        6.30 tokens 21 22 23 -> decoding: emit 21 22 23; await decode
        6.30 migrate -> decoding: leaves, prepare move; await decode migration
        6.30 fetched -> placing: note pull, keep old call, leave calls, go back; take the next worker
        6.30 placed 0 1 -> reserving: open decode for kv; await decode
        6.30 ticket -> prefilling: open prefill; await prefill decode
        6.30 first none -> transferring: computed; await decode prefill
        9.43 tokens -> decoding: has kv; await decode prefill
        9.43 transferred -> decoding: note transfer; await decode
        14.93 tokens 24 25 26 27 28 -> ended: emit 24 25 26 27 28., leave calls; end
        """),
    "the decode worker leaves, and has preempted the request": Story(
        requests=TIGHT, decisions=(at(0, 0),), pools=(0, 2), leaves={0: 25.0}, of=SCARCE, num_moved=2, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 -> computing: open decode; await decode
        10.10 tokens 40 -> decoding: has kv, computed, emit 40; await decode
        18.50 tokens 41 42 43 44 45 46 47 -> decoding: emit 41 42 43 44 45 46 47; await decode
        19.70 tokens 48 -> decoding: emit 48; await decode
        25.20 migrate -> decoding: leaves, prepare move; await decode migration
        25.20 fetched -> placing: note pull, keep old call, leave calls, go back; take the next worker
        25.20 placed 1 -> computing: open decode; await decode
        65.60 tokens 49 -> decoding: has kv, computed, emit 49; await decode
        67.80 tokens 50 51 -> ended: emit 50 51., leave calls; end
        """),
    "the worker that computes it again leaves too": Story(
        requests=TIGHT, decisions=(at(0, 0),), pools=(0, 3), leaves={0: 25.0, 2: 30.0}, of=CHUNKS, num_moved=3, life="""
        0.50 begun -> placing: find place
        0.50 placed 0 -> computing: open decode; await decode
        14.30 tokens 40 -> decoding: has kv, computed, emit 40; await decode
        20.30 tokens 41 42 43 44 45 -> decoding: emit 41 42 43 44 45; await decode
        23.90 tokens 46 47 48 -> decoding: emit 46 47 48; await decode
        25.00 migrate -> decoding: leaves, prepare move; await decode migration
        25.00 fetched -> placing: note pull, keep old call, leave calls, go back; take the next worker
        25.00 placed 2 -> computing: open decode; await decode
        30.20 migrate -> placing: leave calls, the decode worker leaves; find place
        30.20 placed 1 -> computing: open decode; await decode
        72.55 tokens 49 50 51 -> ended: has kv, computed, emit 49 50 51., leave calls; end
        """),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_the_routers_machine_decides(name: str) -> None:
    story = STORIES[name]
    world, found = life(story)
    assert found == dedent(story.life).strip()
    assert world.num_moved == story.num_moved
