"""Events of ServingPools: what has happened between two statuses, and that it is posted once and disturbs nothing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube import AsyncClient, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition

from baton.cluster import Role
from deploy.controller.kubernetes_side import num_outdated
from deploy.kubernetes.events import PoolEvent, PoolEvents, of_rollouts, of_statuses
from deploy.kubernetes.node_plan import NodeLayout, NodePod
from deploy.kubernetes.pools import ServingPool, ServingPools
from deploy.kubernetes.serving_pool import PoolReport
from tests.fakekube.apiserver import RunningApi, running_api
from tests.fakekube.store import Object, Resource

CRD = Path(__file__).parents[4] / "helm" / "baton" / "crds" / "servingpools.yaml"
EVENTS = Resource("", "events")


def status(desired: int, limit: str = "") -> dict[str, Any]:
    condition = {"type": "Limited", "status": "True" if limit else "False", "message": limit or "as asked for"}
    return {"desiredReplicas": desired, "conditions": [condition]}


@pytest.mark.parametrize(
    ("before", "after", "events"),
    [
        (status(2), status(2), []),
        ({}, status(2), []),
        (status(2), status(3), [PoolEvent("Scaled", "the pool should have 3 workers, after 2")]),
        (status(2), status(2, "9 is too many"), [PoolEvent("Limited", "9 is too many", True)]),
        ({}, status(2, "9 is too many"), [PoolEvent("Limited", "9 is too many", True)]),
        (status(2, "9 is too many"), status(2, "8 is too many"), [PoolEvent("Limited", "8 is too many", True)]),
        (status(2, "9 is too many"), status(2, "9 is too many"), []),
        (status(2, "9 is too many"), status(2), []),
    ],
)
def test_what_has_happened_is_between_two_statuses(
    before: dict[str, Any], after: dict[str, Any], events: list[PoolEvent]
) -> None:
    assert of_statuses(before, after) == events


def test_a_roll_out_has_a_start_and_an_end() -> None:
    numbers = (0, 3, 2, 0, 0)
    found = [event.reason for pair in itertools.pairwise(numbers) for event in of_rollouts(*pair)]
    assert found == ["RollingOut", "RolledOut"]
    layout = NodeLayout({Role.PREFILL: "p", Role.DECODE: "d"}, 1)
    pods = [NodePod(name=str(i), deployment="d", is_current=i > 1) for i in range(5)]
    assert num_outdated(layout, pods) == {Role.PREFILL: 0, Role.DECODE: 2}


@pytest.fixture
async def api() -> AsyncIterator[tuple[RunningApi, AsyncClient]]:
    with running_api() as running:
        async with AsyncClient(KubeConfig.from_file(running.kubeconfig(namespace="default"))) as client:
            definition: Any = CustomResourceDefinition.from_dict(yaml.safe_load(CRD.read_text()))
            await client.create(definition)
            yield running, client


def posted(api: RunningApi) -> list[Object]:
    return sorted(api.store.objects(EVENTS, "default"), key=lambda event: str(event["metadata"]["name"]))


def report(desired: int, refusal: str = "") -> PoolReport:
    return PoolReport(desired=desired, num_workers=1, num_ready=1, num_draining=0, refusal=refusal)


async def test_kubectl_describe_shows_what_has_happened(api: tuple[RunningApi, AsyncClient]) -> None:
    running, client = api
    spec = {"role": "decode", "replicas": 2}
    made = await client.create(ServingPool(metadata=ObjectMeta(name="baton-decode", namespace="default"), spec=spec))
    assert made.metadata is not None
    uid = made.metadata.uid
    pools = ServingPools(client, "default", {Role.DECODE: "baton-decode"})
    await pools.read()
    for each in (report(2), report(3), report(3, "there is no room"), report(3, "there is no room")):
        await pools.report({Role.DECODE: each})
    for number in (0, 2, 1, 0):
        await pools.report_outdated({Role.DECODE: number})
    events = posted(running)
    assert [(event["reason"], event["type"]) for event in events] == [
        *(("Scaled", "Normal"), ("Limited", "Warning"), ("RollingOut", "Normal"), ("RolledOut", "Normal")),
    ]
    assert events[1]["message"] == "there is no room"
    for event in events:
        involved = event["involvedObject"]
        assert (involved["kind"], involved["name"], involved["uid"]) == (
            "ServingPool",
            "baton-decode",
            uid,
        )
        assert event["source"] == {"component": "baton-controller"}


async def test_the_same_is_said_once_a_while_and_a_refusal_disturbs_nothing(
    api: tuple[RunningApi, AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    running, client = api
    events = PoolEvents(client, "default")
    for _ in range(3):
        await events.post("a", "1", [PoolEvent("Scaled", "x")])
    await events.post("b", "1", [PoolEvent("Scaled", "x")])
    assert len(posted(running)) == 2
    stranger = KubeConfig.from_file(running.kubeconfig("system:serviceaccount:a:b"))
    async with AsyncClient(stranger) as other:
        with caplog.at_level(logging.WARNING):
            await PoolEvents(other, "default").post("a", "1", [PoolEvent("Scaled", "y")])
    assert "an event of ServingPool a is lost (Scaled: y)" in caplog.text
