"""Tables of models for tests of what stands above them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from baton.cluster import Worker
from router.cluster.orders import ControllerClient
from router.models.operated import OperatedModels
from router.models.table import ModelTable, Release
from router.request.resume import CallsInFlight
from router.serve.worker_client import WorkerClient
from router.timeline.log import RequestLog
from tests.support.builders import model_announcement, no_adapters


def release(service: Any, name: str = "", content_id: str = "content", share: float = 1.0) -> Release:
    """A release that this service, or a stand-in for one, serves."""
    name = name or service.facts.id
    return Release(content_id=content_id, name=name, release=f"{name}-{content_id}", share=share, service=service)


def table_of(
    *services: Any, requests: RequestLog | None = None, calls: CallsInFlight | None = None, default_model: str = ""
) -> ModelTable:
    """A table of models with these services, each under the name of its facts."""
    limiter = SimpleNamespace(is_crowded=False, num_in_flight=0, max_in_flight=1)
    front: Any = SimpleNamespace(requests=requests or RequestLog(), calls=calls or CallsInFlight(), limiter=limiter)
    table = ModelTable(front, default_model)
    for number, service in enumerate(services):
        table.put(release(service, content_id=f"content{number or ''}"))
    return table


def operated(
    name: str = "tiny",
    *workers: Worker,
    controller: Any = None,
    client: Any = None,
    adapters: Any = None,
    content_id: str = "content",
) -> OperatedModels:
    """The only model of a router as operators reach it, with stand-ins for what carries out their orders."""
    entry: Any = SimpleNamespace(
        announcement=model_announcement(content_id, name=name, release=f"{name}-1"),
        model=SimpleNamespace(content_id=content_id, facts=SimpleNamespace(id=name)),
        pools=SimpleNamespace(workers=workers),
        controller=controller or ControllerClient(lambda: None),
        client=client or WorkerClient(),
        adapters=adapters or no_adapters(),
    )
    return OperatedModels(lambda: (entry,))
