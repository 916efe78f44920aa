"""The router serves a structure of any kind, or refuses it by name, within two seconds; streams beside it do not wait.

The seconds are those of an idle core. If other processes share the cores, the test measures how long such a second
takes.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.errors import InvalidRequest
from baton.rpc.errors import from_rpc_error
from baton.v1 import inference_pb2
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Served, request
from tests.support.asking import prompt_of, sampling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.clock

ANSWER_S = 2.0
"""On an idle core. A compiler may take one second of a core's time."""
WAIT_S = 0.1
"""How much longer than without the structure a stream beside it may wait for a token."""
SPIN = """
import time
began_s = time.monotonic()
while time.process_time() < 0.2:
    pass
print((time.monotonic() - began_s) / 0.2)
"""
NUM_TRIES = 3
"""Another test's burst makes one of them slow; a structure that does makes all of them slow."""
STEP_MS = 4.0
NUM_QUIET = 50
"""Tokens that the stream beside gets before a structure comes."""
SERVED, REFUSED, EITHER = "served", "refused", "either"
"""What is made to be costly ends on either side of the second that compiling may take: that depends on the machine."""


def compact(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"))


def alternatives(depth: int) -> Any:
    return {"type": "string"} if not depth else {"oneOf": [alternatives(depth - 1), alternatives(depth - 1)]}


def lists(depth: int) -> Any:
    if not depth:
        return {"type": "integer"}
    return {"anyOf": [lists(depth - 1), {"type": "array", "items": lists(depth - 1)}]}


def chain(keyword: str, length: int) -> Any:
    """Each definition names the next one twice: without a memory, 2 ** length of them."""
    links = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def properties(number: int) -> Any:
    named = {f"p{i}": {"type": "string"} for i in range(number)}
    return {"type": "object", "properties": named, "additionalProperties": False}


SCHEMAS = {
    "nested oneOf": (alternatives(10), REFUSED),
    "oneOf of 3,000": ({"oneOf": [{"const": i} for i in range(3000)]}, EITHER),
    "nested anyOf": (lists(9), EITHER),
    "a loop of $ref": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        EITHER,
    ),
    "anyOf that doubles": (chain("anyOf", 60), EITHER),
    "allOf that doubles": (chain("allOf", 60), EITHER),
    "an enum of 20,000 numbers": ({"enum": list(range(20_000))}, EITHER),
    "an enum of 12,000 texts": ({"enum": [f"v{i}" for i in range(12_000)]}, EITHER),
    "2,000 properties": (properties(2000), EITHER),
    "1,500 properties, all required": (properties(1500) | {"required": [f"p{i}" for i in range(1500)]}, EITHER),
    "an exponential pattern": ({"type": "string", "pattern": "^(a|b|ab)*c{1,1000}(.{0,1000}){0,1000}x$"}, EITHER),
    "59 patterns at once": (
        {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 60)]},
        REFUSED,
    ),
    "a thousand million characters": ({"type": "string", "minLength": 1, "maxLength": 10**9}, EITHER),
    "at least 100,000 items": ({"type": "array", "items": {"type": "string"}, "minItems": 100_000}, EITHER),
    "multiples of a prime": ({"type": "integer", "multipleOf": 1_000_003}, EITHER),
    "numbers of 300 digits": ({"type": "integer", "minimum": -(10**300), "maximum": 10**300}, EITHER),
    "200 patterns of names": (
        {"type": "object", "patternProperties": {f"^.*a{i}.*b$": {"type": "null"} for i in range(200)}},
        EITHER,
    ),
    "half a surrogate": ({"type": "string", "const": "\ud800"}, EITHER),
    "half a surrogate in a pattern": ({"type": "string", "pattern": "^\ud83d$"}, EITHER),
    "a schema of 1 MiB": ({"enum": ["x" * 2**20]}, REFUSED),
    "a keyword that is not known": ({"type": "object", "unevaluatedProperties": False}, REFUSED),
}
STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({"json": compact(schema)}, expected) for name, (schema, expected) in SCHEMAS.items()},
    "100,000 levels": ({"json": "[" * 100_000}, REFUSED),
    "no JSON": ({"json": "{"}, REFUSED),
    "dots of dots": ({"regex": "(.{0,1000}){0,1000}x"}, EITHER),
    "2 ** 1,000 states": ({"regex": "[ab]*a[ab]{1000}c"}, EITHER),
    "a backtracker's worst": ({"regex": "(a?){500}a{500}"}, EITHER),
    "stars of stars": ({"regex": "((a*)*)*b" * 200}, EITHER),
    "letters of all scripts": ({"regex": r"\p{L}{1,1000}" * 50}, EITHER),
    "a million letters": ({"regex": "a{1000000}"}, EITHER),
    "10 ** 8 letters": ({"regex": "(" * 8 + "a" + "{10})" * 8}, EITHER),
    "15,000 alternatives": ({"grammar": "start: " + "|".join(f'"{i}"' for i in range(15_000))}, EITHER),
    "an ambiguous grammar": ({"grammar": 'start: start start | "a" |'}, EITHER),
    "rules that double": (
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(500)) + '\na500: "a"'},
        EITHER,
    ),
    "60,000 names": ({"grammar": "root ::= " + "a " * 60_000}, REFUSED),
    "100,000 times perhaps": ({"grammar": 'start: ("a"? )~1..100000'}, EITHER),
    "lines without an end": ({"grammar": "\n" * 130_000}, REFUSED),
    "2,000 brackets": ({"grammar": "start: /" + "(" * 2000 + "a" + ")" * 2000 + "/"}, REFUSED),
}


@dataclass
class Beside:
    """A client that hears streams without a structure, one after the other, until it is stopped."""

    served: Served
    heard_s: list[float]
    error: BaseException | None = None
    is_stopped: bool = False

    def run(self) -> None:
        try:
            for number in itertools.count():
                answer = self.served.inference.Generate(
                    request(token_ids=prompt_of(number, 32), sampling=sampling(900)), timeout=60
                )
                for _ in answer:
                    self.heard_s.append(time.monotonic())
                    if self.is_stopped:
                        answer.cancel()
                        return
        except BaseException as error:
            self.error = error

    def wait_for(self, num_messages: int) -> None:
        """Waits until so many more have come."""
        least = len(self.heard_s) + num_messages
        wait_until(lambda: len(self.heard_s) >= least)

    def longest_wait_s(self, since_s: float, until_s: float) -> float:
        assert not self.error, self.error
        heard_s = [since_s, *[at_s for at_s in self.heard_s if since_s < at_s < until_s], until_s]
        return max(after - before for before, after in itertools.pairwise(heard_s))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    router = RouterConfig(mode="disaggregated")
    with running_fleet(TransferConfig(), router, step_ms=STEP_MS, lease_s=15.0) as fleet:
        fleet.fill(Role.PREFILL, Role.DECODE)
        yield fleet


@pytest.fixture(scope="module")
def beside(fleet: Fleet) -> Iterator[Beside]:
    found = Beside(fleet.routers[0], [])
    thread = threading.Thread(target=found.run)
    thread.start()
    for structure in ({"regex": "a+"}, {"regex": "("}):  # the first one starts the compiler
        outcome_of(fleet, structure, 0)
    yield found
    found.is_stopped = True
    thread.join(60)
    assert not thread.is_alive()
    assert not found.error, found.error


def outcome_of(fleet: Fleet, structure: dict[str, Any], number: int) -> str:
    asked_for = inference_pb2.StructuredOutputs(**structure)
    asked = request(
        token_ids=prompt_of(number, 40),
        sampling={"structured_outputs": asked_for, "temperature": 1.0, "max_tokens": 6, "seed": number},
    )
    try:
        chunks = list(fleet.inference.Generate(asked, timeout=30))
    except grpc.RpcError as error:
        problem = from_rpc_error(error, "the router")
        assert isinstance(problem, InvalidRequest), problem
        assert re.match(r"sampling\.structured_outputs |schema[^:]*: \S+ cannot be enforced", str(problem)), problem
        return REFUSED
    assert chunks[-1].finish_reason
    return SERVED


def told_apart(structure: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns the same structure as another text: the verdict of one that is known costs nothing."""
    ((kind, text),) = structure.items()
    return {kind: f"(?:{text}){{1}}" if kind == "regex" and number else text + "\n" * number}


def pace() -> float:
    """Returns how many seconds pass at present until a process has had one second of a core's time."""
    return max(1.0, float(subprocess.check_output([sys.executable, "-S", "-c", SPIN])))


LARGEST = {"2,000 properties", "15,000 alternatives"}
"""Each of which keeps a core busy for its two seconds: on a machine that has no other for them they take longer."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.chaos if name in LARGEST else ()) for name in STRUCTURES]
)
def test_it_is_served_or_refused_soon_and_nobody_waits(fleet: Fleet, beside: Beside, name: str) -> None:
    structure, expected = STRUCTURES[name]
    found = []
    for number in range(NUM_TRIES):
        before_s = pace()
        began_s = time.monotonic()
        beside.wait_for(NUM_QUIET)
        asked_s = time.monotonic()
        outcome = outcome_of(fleet, told_apart(structure, number), number)
        ended_s = time.monotonic()
        second_s = (before_s + pace()) / 2
        assert expected in (outcome, EITHER)
        quiet_s, wait_s = beside.longest_wait_s(began_s, asked_s), beside.longest_wait_s(asked_s, ended_s)
        found.append(
            f"{outcome} after {ended_s - asked_s:.2f} s, each {second_s:.1f} s long; "
            f"waits {wait_s * 1e3:.0f}, else {quiet_s * 1e3:.0f} ms"
        )
        print(name, found[-1])
        if ended_s - asked_s <= ANSWER_S * second_s and wait_s <= quiet_s + WAIT_S:
            return
    pytest.fail(f"{name}: {found}")
