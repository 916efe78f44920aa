"""The chart, installed on the test cluster: real helm and kubectl; routers, workers, Ray and Redis as processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2_grpc
from deploy.embedded_redis import valkey_binary
from tests.fakekube.apiserver import RunningApi, running_api
from tests.fakekube.machine import Machine, running_machine
from tests.fakekube.store import Key, Resource
from tests.kube.binaries import Binaries, binaries
from tests.support.load import Clients, Requests, Stream
from tests.support.waiting import wait_until

CHART = Path(__file__).parents[2] / "helm" / "baton"
NAMESPACE, NAME = "serving", "baton"
POOLS = ("prefill", "decode")
PODS, SERVICES, EVENTS = (Resource("", plural) for plural in ("pods", "services", "events"))
SERVING_POOLS = Resource("baton.dev", "servingpools")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler, cc, for pods that have the same ports"
)
TIMEOUT_S = 480
"""On a busy machine `ray start` gives up after 30 s, and is started again, more than once."""
NUM_CLIENTS, NUM_TOKENS = 3, 60
"""Clients of the load, and tokens of each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    api: RunningApi
    machine: Machine
    binaries: Binaries
    environment: dict[str, str]
    values: tuple[str, ...]
    name: str = NAME
    door: str = ""
    """The release with the routers, if that is another one."""
    chart: Path = CHART

    def named(self, name: str) -> Release:
        """A second release beside this one."""
        return replace(self, name=name)

    def of_model(self, name: str, *arguments: str) -> Release:
        """A release with the model `name` alone, which this one's routers serve.

        Args:
            arguments: of its every install and upgrade, beside this one's.
        """
        own = ("--set=parts.door=false", f"--set=door.release={self.name}", f"--set=config.model.served_name={name}")
        return replace(self, name=f"{self.name}-{name}", door=self.name, values=(*self.values, *own, *arguments))

    def helm(self, *arguments: str) -> str:
        return self._run(self.binaries.helm, *arguments)

    def kubectl(self, *arguments: str) -> str:
        return self._run(self.binaries.kubectl, *arguments)

    def install(self, *arguments: str) -> None:
        self.helm("install", self.name, str(self.chart), *self.values, "--wait", f"--timeout={TIMEOUT_S}s", *arguments)

    def upgrade(self, *arguments: str) -> None:
        self.helm("upgrade", self.name, str(self.chart), *self.values, "--wait", f"--timeout={TIMEOUT_S}s", *arguments)

    def baton(self, *arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("baton")), *arguments, "--address", self.grpc]
        return self._run(*command)

    def baton_status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.baton("status", "--json"))
        return found

    @property
    def grpc(self) -> str:
        """host:port of the routers' Service."""
        return f"{self._service_ip}:50051"

    @property
    def http(self) -> str:
        """URL of the routers' Service."""
        return f"http://{self._service_ip}:8000"

    @property
    def _service_ip(self) -> str:
        found: str = self.api.store.get(Key(SERVICES, NAMESPACE, self.door or self.name))["spec"]["clusterIP"]
        return found

    def pool(self, role: str) -> dict[str, Any]:
        return self.api.store.get(Key(SERVING_POOLS, NAMESPACE, self.pool_name(role)))

    def pool_name(self, role: str) -> str:
        return f"{self.name}-{role}"

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of a part of this release that are not about to go."""
        labels = {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/component": component}
        pods = self.api.store.objects(PODS, NAMESPACE)
        return [
            pod
            for pod in pods
            if labels.items() <= pod["metadata"].get("labels", {}).items()
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        wait_until(condition, timeout_s, every_s=0.1, seen=self.picture)

    def wait_for_pool(self, role: str, size: int) -> None:
        """Until it has so many workers, who all serve, and as many pods: none of them has changed its role."""

        def is_so() -> bool:
            status = self.pool(role).get("status", {})
            found = [status.get(name) for name in ("desiredReplicas", "replicas", "readyReplicas")]
            return [*found, len(self.pods(role))] == [size] * 4

        self.wait_for(is_so)

    def node_pods(self) -> list[dict[str, Any]]:
        """Of workers."""
        return [pod for role in POOLS for pod in self.pods(role)]

    def picture(self) -> str:
        """What an operator would look at."""
        lines = [self.kubectl("get", "servingpools,deployments,pods", "-n", NAMESPACE)]
        for event in self.api.store.objects(EVENTS, NAMESPACE):
            times = f"{event['firstTimestamp']} to {event['lastTimestamp']}, {event['count']} times"
            lines.append(f"{times}: {event['involvedObject']['name']} {event['reason']}: {event['message']}")
        for pod in self.api.store.objects(PODS, NAMESPACE):
            for container, path in json.loads(
                pod["metadata"].get("annotations", {}).get("baton.dev/test-log", "{}")
            ).items():
                text = Path(path).read_text(errors="replace") if Path(path).exists() else "(no log)"
                lines.append(f"--- {pod['metadata']['name']} {container}\n{text[-1500:]}")
        return "\n".join(lines)

    def _run(self, *command: object) -> str:
        result = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S + 60,
        )
        assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}\n{self._safe_picture()}"
        return result.stdout

    def _safe_picture(self) -> str:
        pods = self.api.store.objects(PODS, NAMESPACE)
        return "\n".join(
            f"{pod['metadata']['name']}: {json.dumps(pod.get('status', {}).get('containerStatuses', []))[:600]}"
            for pod in pods
        )


@contextlib.contextmanager
def kube_cluster(
    helm_major: int,
    folder: Path,
    cache: Path,
    *values: str,
    num_gpus: int = 0,
    more_images: Mapping[str, list[str]] | None = None,
) -> Generator[Release]:
    """A cluster with nothing in it but the namespace; the values are those of every install and upgrade.

    Args:
        cache: Baton's cache folder, with the model.
        num_gpus: those that pods may ask for.
        more_images: beside those of this commit, by repository: the folders of their programs.
    """
    programs = folder / "redis-bin"
    programs.mkdir()
    (programs / "redis-server").symlink_to(valkey_binary())
    venv = str(Path(sys.executable).parent)
    system = ["/usr/local/bin", "/usr/bin", "/bin"]
    images = {
        "baton-router": [venv, *system],
        "baton-worker": [venv, *system],
        "docker.io/library/redis": [str(programs), *system],
        **(more_images or {}),
    }
    environment = {
        "OMP_NUM_THREADS": "1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # else Ray takes no second node on one machine
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},  # a checkout beside the venv's
    }
    with (
        running_api() as api,
        running_machine(
            api.store, images, lambda user: api.kubeconfig(user=user), environment=environment, num_gpus=num_gpus
        ) as machine,
    ):
        client = os.environ | {
            "KUBECONFIG": str(api.kubeconfig(namespace=NAMESPACE)),
            "HOME": str(folder),  # kubectl keeps what it knows of a server there
            "HELM_CACHE_HOME": str(folder / "helm"),
            "HELM_CONFIG_HOME": str(folder / "helm"),
            "HELM_DATA_HOME": str(folder / "helm"),
        }
        hosted = ("--set", "modelCache.type=hostPath", "--set", f"modelCache.hostPath={cache}")
        release = Release(
            api=api, machine=machine, binaries=binaries(helm_major), environment=client, values=(*hosted, *values)
        )
        release.kubectl("create", "namespace", NAMESPACE)
        yield release


def load_on(address: str, model: str = "") -> Clients:
    """Clients of the routers, each with a connection of its own. They request the model by its name, if it is given."""

    def script(number: int) -> Requests:
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for turn in itertools.count(1):
                prompt = [1 + (number * 7919 + turn * 31 + i) % 40_000 for i in range(100 + turn % 50)]
                yield Stream(inference=stub, prompt=prompt, max_tokens=NUM_TOKENS, fields={"model": model}).served

    return Clients(script, NUM_CLIENTS)
