"""What others export about the machines of a release, in their own form: dcgm-exporter, cAdvisor, kube-state-metrics.

The names and labels are those of dcgm-exporter 4 (with NVLink's counters), of the kubelet of Kubernetes 1.30 and of
kube-state-metrics 2.13. Counters rise from one scrape to the next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

NAMESPACE = "serving"
PODS = ("baton-router-7c9d-x1", "baton-prefill-5f7b-x2", "baton-decode-6d8c-x3")
STRANGER = "other-0"
"""A pod of the same namespace that is not Baton's."""
GPU = 'gpu="0",UUID="GPU-1",pci_bus_id="0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n1"'
GPU_GAUGES = {
    "DCGM_FI_DEV_GPU_UTIL": 97,
    "DCGM_FI_DEV_FB_USED": 70_000,
    "DCGM_FI_DEV_FB_FREE": 11_000,
    "DCGM_FI_DEV_POWER_USAGE": 612.5,
    "DCGM_FI_DEV_GPU_TEMP": 61,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.43,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.71,
    "DCGM_FI_PROF_NVLINK_TX_BYTES": 2.5e9,
    "DCGM_FI_PROF_NVLINK_RX_BYTES": 2.4e9,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 1e8,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 2e8,
}
CONTAINER_COUNTERS = {
    "container_cpu_usage_seconds_total": 0.5,
    "container_cpu_cfs_periods_total": 10,
    "container_cpu_cfs_throttled_periods_total": 1,
}
POD_COUNTERS = {"container_network_receive_bytes_total": 5e6, "container_network_transmit_bytes_total": 6e6}
PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")


def _of(pod: str) -> str:
    return f'namespace="{NAMESPACE}",pod="{pod}"'


def _container(pod: str) -> str:
    return f'{_of(pod)},container="{pod.split("-")[1]}"'


def gpus(number: int) -> Iterator[str]:
    """What dcgm-exporter shows: those of two workers' pods, and one that no pod has."""
    for pod in (*(_container(pod) for pod in (*PODS[1:], STRANGER)), 'namespace="",pod="",container=""'):
        yield from (f"{name}{{{GPU},{pod}}} {value}" for name, value in GPU_GAUGES.items())


def containers(number: int) -> Iterator[str]:
    """What the kubelet shows: each container, and each pod as a whole."""
    for pod in (*PODS, STRANGER):
        for labels in (_container(pod), f'{_of(pod)},container=""'):
            yield from (f"{name}{{{labels}}} {each * number}" for name, each in CONTAINER_COUNTERS.items())
            yield f"container_memory_working_set_bytes{{{labels}}} {5e9}"
        yield from (f'{name}{{{_of(pod)},interface="eth0"}} {each * number}' for name, each in POD_COUNTERS.items())


def pods(number: int) -> Iterator[str]:
    """What kube-state-metrics shows: one container that was ended for its memory, and one that waits for its image."""
    for pod in (*PODS, STRANGER):
        yield from (f'kube_pod_status_phase{{{_of(pod)},phase="{each}"}} {int(each == "Running")}' for each in PHASES)
        for resource, most in (("cpu", 4), ("memory", 8e9)):
            yield f'kube_pod_container_resource_limits{{{_container(pod)},resource="{resource}"}} {most}'
        yield f"kube_pod_container_status_restarts_total{{{_container(pod)}}} {number // 10}"
        yield f"kube_pod_status_unschedulable{{{_of(pod)}}} {int(pod == PODS[2])}"
    reasons = f'{_container(PODS[1])},reason="OOMKilled"', f'{_container(PODS[2])},reason="ImagePullBackOff"'
    yield f"kube_pod_container_status_last_terminated_reason{{{reasons[0]}}} 1"
    yield f"kube_pod_container_status_waiting_reason{{{reasons[1]}}} 1"


EXPORTERS = {"dcgm": gpus, "kubelet": containers, "kube-state": pods}


def names() -> set[str]:
    """Every metric that they export."""
    return {line.partition("{")[0] for lines in EXPORTERS.values() for line in lines(1)}


@contextlib.contextmanager
def running_exporters() -> Iterator[list[dict[str, Any]]]:
    """Serves all of them for the length of a block, and yields Prometheus' jobs that scrape them, as in Kubernetes:
    labels of dcgm-exporter that its target has, too, become `exported_...`; those of the others are kept."""
    scrapes = count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = "\n".join(EXPORTERS[self.path.removeprefix("/")](next(scrapes))) + "\n"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=partial(server.serve_forever, poll_interval=0.1))
        serving.start()
        try:
            target = f"127.0.0.1:{server.server_address[1]}"
            yield [
                {
                    "job_name": name,
                    "metrics_path": f"/{name}",
                    "honor_labels": name != "dcgm",
                    "static_configs": [{"targets": [target], "labels": {"namespace": "gpu-operator", "pod": name}}],
                }
                for name in EXPORTERS
            ]
        finally:
            server.shutdown()
            serving.join()
