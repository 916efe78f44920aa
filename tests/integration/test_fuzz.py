"""Whatever a client sends, over HTTP and gRPC: it is answered as the document says, and nothing stays.

FUZZ_SECONDS is the length of each of the three (make chaos: 200). Each prints its seed; FUZZ_SEED repeats it, and with
FUZZ_NUMBER only one request of the last two.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from engine.testing import expected_tokens
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import Answer, request
from tests.support.asking import prompt_of, sampling
from tests.support.bodies import BODIES, MESSAGES
from tests.support.operator import OPERATOR_ENTRY
from tests.support.spoiling import spoiled, spoiled_json, spoiled_wire

SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("FUZZ_SEED") or secrets.randbelow(2**31))
NUMBER = os.environ.get("FUZZ_NUMBER")
ANSWER_S = 120.0
"""An answer that takes longer counts as a hang."""
NUM_CLIENTS = 4
MAX_SHOWN = 10
"""Failures of a test that are shown: after as many it stops."""
NUM_LEAST = 20
"""Requests that are sent on the slowest machine, however long they take."""
ENOUGH_S = 6.0
"""For schemathesis to get to every operation where little else runs: else it is started again."""
MAX_IN_FLIGHT, MAX_CHOICES = 96, 16
KEY = {"Authorization": "Bearer key-of-fuzz"}
DEFECT = "internal error"
"""What is said of a defect of ours, wherever it happens, and whatever the status."""
LAST_EVENTS = {
    "/v1/messages": ("message_stop", "error"),
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed", "error"),
}
"""How streams end that do not end as OpenAI's older ones do."""
CHECKS_LEFT_OUT = "positive_data_acceptance,unsupported_method"
"""The document has no limit that is the model's, and no contradiction between two fields. A method that another server
has of a path is refused by name, with 404, and a 405 has no `Allow`."""

pytestmark = [pytest.mark.first, pytest.mark.timeout(SECONDS + 600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    hashed = hashlib.sha256(b"key-of-fuzz").hexdigest()
    path.write_text(f"{OPERATOR_ENTRY}fuzz: {{key_sha256: [{hashed}], parse_special: true, operator: true}}")
    router = RouterConfig(
        mode="disaggregated",
        tenants_file=str(path),
        strict=True,  # what the document describes
        max_in_flight=MAX_IN_FLIGHT,
        default_max_tokens=24,
        slo_classes={"default": SloClassConfig(ttft_ms=600_000.0)},  # nothing is shed where the machine is slow
    )
    with running_fleet(TransferConfig(), router, lease_s=15.0, num_blocks=1024, max_model_len=1024) as fleet:
        fleet.fill(*Role)
        yield fleet


@pytest.fixture(autouse=True)
def unharmed(fleet: Fleet) -> Iterator[None]:
    """Afterwards the same processes serve, as well and as many as before, and hold nothing."""
    router = fleet.routers[0]
    before, num_logged = fleet.client.status(), len(router.log)
    print(f"FUZZ_SEED={SEED}")
    yield
    status = router.wait_until_idle()
    assert pids(status) == pids(before)
    assert "Traceback" not in router.log[num_logged:], router.log[-20_000:]
    many = {"prompt": [[7, 8, 9]] * (MAX_IN_FLIGHT // MAX_CHOICES), "n": MAX_CHOICES, "max_tokens": 100}
    status_code, answer = post(fleet, "/v1/completions", json.dumps({**many, "ignore_eos": True}).encode())
    assert status_code == 200, f"not all that may be in flight is free: {answer[:500]!r}"
    asked, metadata = request(token_ids=prompt_of(1, 40), sampling=sampling(6)), (("x-api-key", "key-of-fuzz"),)
    served = Answer(list(fleet.inference.Generate(asked, timeout=ANSWER_S, metadata=metadata)))
    assert served.token_ids == expected_tokens(prompt_of(1, 40), 6)
    router.wait_until_idle()


def pids(status: dict[str, Any]) -> dict[str, int]:
    return {each["id"]: each["pid"] for each in (*status["workers"], *status["routers"])}


# -- what the document says ------------------------------------------------------------------------------------------


def schemathesis(fleet: Fleet, folder: Path, seconds: float, statuses: list[int | str], *words: str) -> None:
    """Runs it for so many seconds, or as long as it takes to get to every operation.

    Args:
        statuses: those that an answer may have.
    """
    config, report = folder / "schemathesis.toml", folder / "report.json"
    config.write_text(f"[checks.not_a_server_error]\nexpected-statuses = {json.dumps(statuses)}\n")
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("--config-file", config, "--no-color", "run", f"http://{fleet.routers[0].http}/openapi.json"),
        *("--max-time", max(1, round(seconds)), "--seed", SEED, "--generation-database", "none"),
        *("--suppress-health-check", "all", "--request-timeout", ANSWER_S, "--continue-on-failure"),
        *("--output-sanitize", "false", "--output-truncate", "false", "--warnings", "off"),
        *("--report", "json", "--report-json-path", report, "--exclude-checks", CHECKS_LEFT_OUT, *words),
    ]
    most_s = seconds + 4 * ANSWER_S
    found = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=most_s)
    assert report.exists(), found.stdout[-20_000:] + found.stderr[-2_000:]
    written = json.loads(report.read_text())
    assert not [*written["failures"], *written["errors"]], found.stdout[-20_000:]
    operations, num_requests = written["operations"], written["test_cases"]["generated"]
    print(f"schemathesis: {num_requests} requests, {operations['tested']} of {operations['total']} operations")
    assert operations["total"] >= len(document(fleet)["paths"])
    if operations["tested"] < operations["total"]:  # the machine is slow
        schemathesis(fleet, folder, 2 * seconds, statuses, *words)
        return
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2_000:]
    assert num_requests >= operations["total"]


def test_answers_are_what_the_document_says(fleet: Fleet, tmp_path: Path) -> None:
    header = ("-H", f"Authorization: {KEY['Authorization']}")
    schemathesis(fleet, tmp_path, max(ENOUGH_S, SECONDS * 3 / 4), ["2xx", "4xx", 503], *header)


def test_without_a_key_no_path_is_served(fleet: Fleet) -> None:
    for path, item in document(fleet)["paths"].items():
        bodies = BODIES.get(path, ({},))
        for method in item.keys() & {"get", "post"}:
            connection = http.client.HTTPConnection(fleet.routers[0].http, timeout=ANSWER_S)
            with contextlib.closing(connection):
                body = json.dumps(bodies[0]) if method == "post" else None
                connection.request(method.upper(), path, body, {"Content-Type": "application/json"})
                assert connection.getresponse().status == 401, (method, path)


@pytest.mark.chaos
def test_without_a_key_nothing_is_served(fleet: Fleet, tmp_path: Path) -> None:
    schemathesis(fleet, tmp_path, SECONDS / 4, [401])


@functools.cache
def document(fleet: Fleet) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{fleet.routers[0].http}/openapi.json", timeout=ANSWER_S) as answer:
        read: dict[str, Any] = json.loads(answer.read())
    return read


# -- what is served, but for some of its parts -----------------------------------------------------------------------


@dataclass(frozen=True)
class HttpRequest:
    """Args:
    leaves_after: bytes of the answer after which the client closes its connection; None: it reads all of it.
    """

    path: str
    body: bytes
    headers: dict[str, str]
    leaves_after: int | None = None


ORDERS = {"/api/adapters", "/api/adapters/remove", "/api/models/wake"}
"""Orders that no worker here can carry out; schemathesis' bodies are refused."""


def test_bodies_with_changed_parts_are_refused_or_served(fleet: Fleet) -> None:
    served = {path: bodies for path, bodies in BODIES.items() if path in document(fleet)["paths"]}
    unknown = {path for path, item in document(fleet)["paths"].items() if "post" in item and "{" not in path}
    unknown -= BODIES.keys() | ORDERS  # orders, which have a name in their path, get schemathesis' bodies alone
    assert not unknown, "tests/support/bodies.py has nothing for them"
    for path, bodies in served.items():
        for body in bodies:
            status, answer = post(fleet, path, json.dumps(body).encode())
            assert status == 200, (path, body, answer[:1000])
    statuses = hammer(lambda number: send_spoiled(fleet, served, number))
    assert statuses[200] > 0 < statuses[400], statuses


def hammer(send: Callable[[int], object]) -> Counter[object]:
    """Clients that send requests by their numbers until the time is over, and `NUM_LEAST` in any case; how many of each
    outcome there were.
    """
    numbers, until_s = itertools.count(), time.monotonic() + SECONDS
    found: Counter[object] = Counter()
    wrong: list[str] = []

    def client(_: int) -> None:
        while (time.monotonic() < until_s or found.total() <= NUM_LEAST) and len(wrong) < MAX_SHOWN:
            number = next(numbers)
            try:
                found[send(number)] += 1
            except Exception as error:
                wrong.append(f"FUZZ_SEED={SEED} FUZZ_NUMBER={number}: {error}")

    if NUMBER is not None:
        return Counter([send(int(NUMBER))])
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(client, range(NUM_CLIENTS)))
    print(f"{found.total()} requests: {dict(found.most_common())}")
    assert not wrong, "\n".join(wrong)
    return found


def send_spoiled(fleet: Fleet, bodies: dict[str, tuple[dict[str, Any], ...]], number: int) -> int:
    """Returns the status; 0: the client has left before there was one."""
    sent = spoiled_request(fleet, bodies, random.Random(f"{SEED} http {number}"))
    try:
        status, kind, answer = exchange(fleet, sent)
        if sent.leaves_after is None:
            check_answer(fleet, sent, status, kind, answer)
        return status
    except Exception as error:
        raise AssertionError(f"{sent.path} {sent.headers} {sent.body[:3000]!r}: {error!r}") from error


def spoiled_request(fleet: Fleet, bodies: dict[str, tuple[dict[str, Any], ...]], dice: random.Random) -> HttpRequest:
    path = dice.choice(list(bodies))
    body = dict(dice.choice(bodies[path]))
    if dice.random() < 0.4 and is_streamed(fleet, path):
        body["stream"] = True
    headers = dict(KEY, **{"Content-Type": "application/json"})
    if dice.random() < 0.05:
        types = (
            "",
            "text/plain",
            "application/json; charset=utf-16",
            "application/x-www-form-urlencoded",
            "é",
            "a/b+json",
        )
        headers["Content-Type"] = dice.choice(types)
    if dice.random() < 0.05:
        headers["X-Request-Id"] = dice.choice(("", "x", "é", "x" * 129, "x" * 5000, "a b", "\t", "{}", "0"))
    if dice.random() < 0.02:
        headers["Authorization"] = dice.choice(
            ("", "Bearer", "Bearer ", "Bearer é", "Basic Og==", "Bearer " + "k" * 5000)
        )
    leaves_after = dice.choice((0, 1, 400)) if dice.random() < 0.1 else None
    return HttpRequest(path, spoiled_json(body, dice), headers, leaves_after)


def is_streamed(fleet: Fleet, path: str) -> bool:
    return "text/event-stream" in document(fleet)["paths"][path]["post"]["responses"]["200"]["content"]


def post(fleet: Fleet, path: str, body: bytes) -> tuple[int, bytes]:
    status, _, answer = exchange(fleet, HttpRequest(path, body, KEY | {"Content-Type": "application/json"}))
    return status, answer


def exchange(fleet: Fleet, sent: HttpRequest) -> tuple[int, str, bytes]:
    """The status, the type and the answer; 0 for the status: the client has left before there was one."""
    connection = http.client.HTTPConnection(fleet.routers[0].http, timeout=ANSWER_S)
    try:
        headers = {name: value.encode() for name, value in sent.headers.items()}
        connection.request("POST", sent.path, sent.body, headers)
        if sent.leaves_after == 0:
            return 0, "", b""
        response = connection.getresponse()
        answer = response.read() if sent.leaves_after is None else response.read(sent.leaves_after)
        return response.status, response.headers.get_content_type(), answer
    finally:
        connection.close()


def check_answer(fleet: Fleet, sent: HttpRequest, status: int, kind: str, answer: bytes) -> None:
    text = answer.decode()
    assert status < 500 or status == 503, f"{status} {text[:2000]}"
    assert DEFECT not in text, f"{status} {text[-2000:]}"
    responses = document(fleet)["paths"][sent.path]["post"]["responses"]
    assert str(status) in responses, f"{status} is not in the document: {text[:2000]}"
    assert kind in responses[str(status)]["content"], f"{status} {kind} is not in the document: {text[:2000]}"
    if kind != "text/event-stream":
        validator(fleet, sent.path, str(status), kind).validate(json.loads(text))
        return
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    said = [json.loads(event) for event in events if event != "[DONE]"]
    if sent.path in LAST_EVENTS:
        assert said[-1]["type"] in LAST_EVENTS[sent.path], text[-2000:]
    else:
        assert events[-1] == "[DONE]" or "error" in said[-1], text[-2000:]


@functools.cache
def validator(fleet: Fleet, path: str, status: str, kind: str) -> Any:
    parts = ("paths", path, "post", "responses", status, "content", kind, "schema")
    pointer = "/".join(part.replace("~", "~0").replace("/", "~1") for part in parts)
    return jsonschema.Draft202012Validator({**document(fleet), "$ref": f"#/{pointer}"})


# -- gRPC ------------------------------------------------------------------------------------------------------------


def test_messages_with_changed_parts_are_refused_or_served(fleet: Fleet) -> None:
    with grpc.insecure_channel(fleet.routers[0].grpc) as channel:
        for method, messages in MESSAGES.items():
            for message in messages:
                assert call(channel, method, message.SerializeToString()) is grpc.StatusCode.OK, message
        codes = hammer(lambda number: send_message(channel, number))
    assert codes[grpc.StatusCode.OK] > 0 < codes[grpc.StatusCode.INVALID_ARGUMENT], codes


def send_message(channel: grpc.Channel, number: int) -> grpc.StatusCode:
    dice = random.Random(f"{SEED} grpc {number}")
    method = dice.choice([*MESSAGES, *["/baton.v1.Inference/Generate"] * 10])
    original = dice.choice(MESSAGES[method])
    message = type(original).FromString(original.SerializeToString())
    if message.DESCRIPTOR.fields and dice.random() < 0.8:
        spoiled(message, dice)
    raw = message.SerializeToString()
    if dice.random() < 0.3:
        raw = spoiled_wire(raw, dice)
    leaves_after, timeout_s = None, ANSWER_S
    if dice.random() < 0.15:
        leaves_after = dice.randint(0, 3)
    elif dice.random() < 0.1:
        timeout_s = dice.choice((0.0, 0.002, 0.01, 0.05))
    try:
        code = call(channel, method, raw, leaves_after, timeout_s)
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or timeout_s < ANSWER_S, "it hangs"
    except Exception as error:
        raise AssertionError(f"{method} {raw[:3000]!r}: {error!r}") from error
    return code


def call(
    channel: grpc.Channel, method: str, raw: bytes, leaves_after: int | None = None, timeout_s: float = ANSWER_S
) -> grpc.StatusCode:
    """How the call ends. A client that leaves after so many messages cancels it."""
    streams: Any = channel.unary_stream(method)
    answers = streams(raw, timeout=timeout_s, metadata=(("x-api-key", "key-of-fuzz"),))
    try:
        for _ in itertools.islice(answers, leaves_after):
            pass
        if leaves_after is not None:
            answers.cancel()
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = answers.code()
    assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (code, answers.details())
    assert DEFECT not in (answers.details() or ""), (code, answers.details())
    return code
