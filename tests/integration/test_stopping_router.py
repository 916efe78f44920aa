"""A router that stops while requests are in flight: what each API tells the clients whose requests do not complete."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.errors import RouterStopping
from baton.v1 import inference_pb2
from tests.chaos.fleet import Fleet, RouterProcess, running_fleet
from tests.support.waiting import wait_until

SAYS = str(RouterStopping())
NUM_TOKENS = 4000
"""Length of the answers, of 50 ms each: no request completes in time."""
CHAT = [{"role": "user", "content": "Count to ten thousand."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "One, two,", "max_tokens": NUM_TOKENS, "ignore_eos": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    "/v1/messages": {"model": "", "messages": CHAT, "max_tokens": NUM_TOKENS},
    "/v1/responses": {"input": "Count to ten thousand.", "max_output_tokens": NUM_TOKENS},
}


def posted(router: RouterProcess, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Returns the status and all of the body. A body that is cut off raises http.client.IncompleteRead."""
    with contextlib.closing(http.client.HTTPConnection(router.http, timeout=60)) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            return response.status, response.read().decode()


def generated(router: RouterProcess) -> grpc.RpcError:
    request = inference_pb2.GenerateRequest(
        text="One, two,", sampling=inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(router.inference.Generate(request, timeout=60))
    return caught.value


def num_running(fleet: Fleet) -> int:
    return sum(int(worker["running"]) for worker in fleet.client.status()["workers"])


def test_each_client_is_told_that_its_router_stops() -> None:
    settings = RouterConfig(mode="aggregated", drain_timeout_s=0.5)
    with ThreadPoolExecutor(16) as pool, running_fleet(TransferConfig(), settings, step_ms=50.0) as fleet:
        router = fleet.fill(Role.DECODE)
        whole = {path: pool.submit(posted, router, path, body) for path, body in BODIES.items()}
        streams = {path: pool.submit(posted, router, path, {**body, "stream": True}) for path, body in BODIES.items()}
        call = pool.submit(generated, router)
        wait_until(lambda: num_running(fleet) == 2 * len(BODIES) + 1, 60.0, seen=lambda: num_running(fleet))
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(30) == 0
        for path, answering in whole.items():
            status, text = answering.result(30)
            assert (status, json.loads(text)["error"]["message"]) == (503, SAYS), path
        for path, answering in streams.items():
            status, text = answering.result(30)
            assert status == 200, path
            last = text[text.rindex("data: {") :]
            assert SAYS in last, (path, text[-500:])
        error = call.result(30)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, SAYS)
        log = router.log
        assert "Exception in ASGI application" not in log, log
        assert "graceful shutdown exceeded" not in log, log
