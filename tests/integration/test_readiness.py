"""A router whose workers are all gone for a while keeps its clients, and serves them when workers come."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from engine.testing import expected_tokens
from tests.chaos.fleet import RouterProcess, running_fleet
from tests.integration.cluster import request
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.integration]
PROMPT = list(range(1, 60))


def endpoints(router: RouterProcess) -> tuple[int, bool]:
    """What a load balancer is told: the status of /readyz, and whether gRPC serves."""
    try:
        with urllib.request.urlopen(f"http://{router.http}/readyz", timeout=30) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    with grpc.insecure_channel(router.grpc) as channel:
        check = health_pb2.HealthCheckRequest(service="baton.v1.Inference")
        health = health_pb2_grpc.HealthStub(channel).Check(check, timeout=30)
    return status, health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.usefixtures("model_dir")
def test_a_router_is_ready_while_requests_wait_for_workers_that_are_gone() -> None:
    with running_fleet(TransferConfig(), RouterConfig(mode="auto", worker_wait_s=25.0), lease_s=1.0) as fleet:
        router = fleet.routers[0]
        fleet.wait_for()
        assert endpoints(router) == (503, False)
        fleet.wait_for(first := fleet.add(Role.DECODE))
        wait_until(lambda: endpoints(router) == (200, True))
        fleet.remove(first, signal.SIGKILL)
        wait_until(lambda: not fleet.client.status()["workers"])
        assert endpoints(router) == (200, True)
        waiting = router.inference.Generate(request(token_ids=PROMPT, sampling={"temperature": 0, "max_tokens": 5}))
        fleet.wait_for(second := fleet.add(Role.DECODE))
        assert [token for message in waiting for token in message.token_ids] == expected_tokens(PROMPT, 5)
        fleet.remove(second, signal.SIGKILL)
        wait_until(lambda: endpoints(router) == (503, False), 120.0)
