from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.cluster import Cluster, running_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver that keeps the spans, with the name of the service that sent each."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(  # noqa: N802 - the protocol's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture(scope="package")
def trace_receiver() -> Iterator[tuple[TraceReceiver, str]]:
    receiver = TraceReceiver()
    with futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield receiver, f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture(scope="package")
def split_cluster(model_dir: Path) -> Iterator[Cluster]:
    """The real model, one worker a pool, every prompt transferred. None is refused, however slow the machine.

    One for all files of `ONE_REAL_CLUSTER`.
    """
    with running_cluster(router_mode="disaggregated", router_slo_classes='{"default": {"ttft_ms": 600000}}') as cluster:
        yield cluster


OWN_MODULES = ("baton", "deploy", "engine", "json", "kvstore", "ray", "router", "socket", "worker")
"""What a user may have called a file of theirs."""


def own_file(module: str) -> tuple[str, str]:
    """Its name and its text. Whoever imports it ends."""
    return f"{module}.py", f"raise SystemExit('this is my own {module}.py')"


@pytest.fixture(scope="package")
def arithmetic_cluster(
    model_dir: Path, trace_receiver: tuple[TraceReceiver, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two workers a pool with the model that can be worked out by hand: plumbing only.

    One for all files of `ONE_CLUSTER`, gone before another folder's test counts this process's threads. A test leaves
    two workers ready in each pool, and a router. It is started in a folder of a user's modules, and to Ray's memory
    monitor the machine is full: where it runs, it kills worker after worker.
    """
    folder = tmp_path_factory.mktemp("a folder of modules")
    for name, text in map(own_file, OWN_MODULES):
        (folder / name).write_text(text)
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as place:
            place.chdir(folder)
            place.setenv("RAY_memory_usage_threshold", "0")
            cluster = stack.enter_context(
                running_cluster(
                    "--prefill", "2", "--decode", "2",
                    testing_arithmetic="true", engine_num_blocks="512", router_mode="disaggregated",
                    telemetry_otlp_endpoint=trace_receiver[1],
                )
            )  # fmt: skip
        yield cluster
