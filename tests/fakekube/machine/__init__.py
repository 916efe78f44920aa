"""One node's worth of cluster: controllers, a scheduler and a kubelet that starts pods as local processes.

    Store ──change──> Controllers ──ReplicaSets, Pods, Endpoints──> Store
                      Kubelet.look ──> Pod.live: folders, processes, probes ──status──> Store
                      Proxy: cluster IP ──> ready pods

Decided in pure modules: `deployment`, `replicaset`, `service`, `scheduler`, `podstatus`, `translate`, `environment`.
Done elsewhere: `controllers` writes the store, `pod` starts and ends, `probes` asks, `proxy` forwards.

All of it runs on one event loop in a thread of its own; a second thread waits for the store's changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.fakekube.machine import wildcard
from tests.fakekube.machine.addresses import Addresses
from tests.fakekube.machine.controllers import Controllers
from tests.fakekube.machine.kubelet import Kubelet
from tests.fakekube.machine.objects import EVENT, GPU, NODE, POD, SERVICE, name_of
from tests.fakekube.machine.pod import Environment
from tests.fakekube.machine.processes import Process, of_containers
from tests.fakekube.machine.proxy import Proxy
from tests.fakekube.machine.service import endpoints
from tests.fakekube.machine.view import View
from tests.fakekube.store import Exists, Key, Missing, Object, Store, now

NODE_KEY = Key(NODE, "", "machine")
LOOK_EVERY_S = 0.5
"""Where nothing changes: time itself makes pods available."""
STOP_TIMEOUT_S = 60.0


@contextmanager
def running_machine(
    store: Store,
    images: Mapping[str, list[str]],
    kubeconfig_of: Callable[[str], str | Path] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    node_labels: Mapping[str, str] | None = None,
    num_gpus: int = 0,
    backoff_s: float = 0.5,
) -> Generator[Machine]:
    """Runs what the store asks for. Leaving it kills every pod's processes; the objects stay as they are.

    Args:
        images: an image's repository, without tag -> folders of programs.
        kubeconfig_of: a user's name -> the path of a kubeconfig. Pods with a service account's token get it.
        environment: variables of every container, as if its image set them.
        num_gpus: what the node says it has.
        backoff_s: before a container's first restart; it doubles, up to ten times that.
    """
    machine = Machine(store, images, kubeconfig_of, environment or {}, node_labels or {}, num_gpus, backoff_s)
    try:
        yield machine
    finally:
        machine.stop()


class Machine:
    def __init__(
        self,
        store: Store,
        images: Mapping[str, list[str]],
        kubeconfig_of: Callable[[str], str | Path] | None,
        environment: Mapping[str, str],
        node_labels: Mapping[str, str],
        num_gpus: int,
        backoff_s: float,
    ) -> None:
        self._store = store
        self._addresses = Addresses()
        self.folder = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
        """Short: see `volumes`."""
        self._marks: set[str] = set()
        self._failure: BaseException | None = None
        self._stopped = asyncio.Event()
        self._change = asyncio.Event()
        self._environment = Environment(
            store=store,
            node_name=NODE_KEY.name,
            node_ip=self._addresses.node,
            images=images,
            environment=wildcard.environment(self.folder) | dict(environment),
            kubeconfig_of=kubeconfig_of,
            backoff_s=backoff_s,
            address_of=self._address_of,
            claim_folder=self._claim_folder,
            next_change=lambda: self._change,
            report=self._report,
            started=self._started,
        )
        store.create(NODE_KEY, _node(self._addresses.node, dict(node_labels), num_gpus))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="machine")
        self._watcher = threading.Thread(target=self._watch, name="machine-watch")
        self._thread.start()
        self._watcher.start()

    @property
    def is_alive(self) -> bool:
        """False: it has failed, and leaving it will say of what."""
        return self._thread.is_alive()

    def pods(self) -> list[Object]:
        return self._store.objects(POD)

    def logs(self, pod: str, container: str, namespace: str = "") -> str:
        """What a container has written, in all its runs; also of a pod that is gone.

        `NAME.preStop` is what its hook has written. Empty before there is anything.
        """
        name = container if "." in container else f"{container}.log"
        return "".join(path.read_text() for path in (self.folder / "logs").glob(f"{namespace or '*'}.{pod}/{name}"))

    def stop(self) -> None:
        """Kills what is left. Raises what went wrong in the machine itself."""
        with contextlib.suppress(RuntimeError):  # it has failed, and its loop is closed
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_TIMEOUT_S)
        with contextlib.suppress(Missing):
            self._store.delete(NODE_KEY)  # the watch ends with it
        self._watcher.join(STOP_TIMEOUT_S)
        self._addresses.close()
        assert not self._thread.is_alive(), "the machine does not stop"
        assert not self._watcher.is_alive(), "the machine's watch does not stop"
        shutil.rmtree(self.folder)
        if self._failure is not None:
            raise self._failure
        left = of_containers(self._marks)
        assert not left, f"still running: {left}"

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._run())
            except BaseException as error:
                traceback.print_exc(file=sys.stderr)  # now: a test may wait for long before it leaves
                self._failure = error

    async def _run(self) -> None:
        proxy = Proxy()
        view = View(self._store)
        controllers = Controllers(self._store, view, self._addresses, NODE_KEY)
        async with asyncio.TaskGroup() as tasks:
            kubelet = Kubelet(self.folder, self._addresses, self._environment, tasks)
            try:
                while not self._stopped.is_set():
                    change = self._change
                    proxy.set_routes(controllers.routes())
                    controllers.look()
                    kubelet.look(view.objects(POD))
                    await self._wait(change)
            finally:
                await proxy.close()
                await kubelet.kill_all()

    async def _wait(self, change: asyncio.Event) -> None:
        """For a change, the end, or some time."""
        waits = [asyncio.create_task(event.wait()) for event in (change, self._stopped)]
        await asyncio.wait(waits, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _watch(self) -> None:
        """In a thread of its own."""
        while self._thread.is_alive():
            with self._store.watch(lambda key: key.resource != EVENT) as events:
                for event in events:
                    if event.type == "DELETED" and event.key == NODE_KEY:
                        return
                    with contextlib.suppress(RuntimeError):  # the loop is closed: the node goes next
                        self._loop.call_soon_threadsafe(self._changed)

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _address_of(self, name: str, namespace: str) -> str | None:
        """A Service's cluster IP; of a headless one, a pod's address."""
        try:
            found = self._store.get(Key(SERVICE, namespace, name))
        except Missing:
            return None
        address = found["spec"].get("clusterIP")
        if address != "None":
            return address or None
        pods = endpoints(found, self._store.objects(POD, namespace))
        return pods[0].ip if pods else None

    def _claim_folder(self, namespace: str, name: str) -> Path:
        path = self.folder / "claims" / f"{namespace}.{name}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _started(self, process: Process) -> None:
        self._marks.add(process.mark)

    def _report(self, pod: Object, reason: str, message: str) -> None:
        """Writes an Event, or counts it again."""
        metadata = pod["metadata"]
        identity = uuid.uuid5(uuid.NAMESPACE_OID, f"{metadata['uid']}{reason}{message}").hex[:16]
        key = Key(EVENT, metadata["namespace"], f"{name_of(pod)}.{identity}")
        involved = {"apiVersion": "v1", "kind": "Pod", "name": name_of(pod), "namespace": key.namespace}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {},
            "involvedObject": involved | {"uid": metadata["uid"]},
            "reason": reason,
            "message": message,
            "type": "Normal" if reason == "Killing" else "Warning",
            "source": {"component": "kubelet", "host": NODE_KEY.name},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        try:
            self._store.create(key, event)
        except Exists:
            self._store.modify(key, lambda e: e.update(count=e["count"] + 1, lastTimestamp=now()))


def _node(ip: str, labels: dict[str, str], num_gpus: int) -> Object:
    resources = {"cpu": str(os.cpu_count()), "memory": str(psutil.virtual_memory().total), "pods": "250"}
    resources |= {GPU: str(num_gpus)} if num_gpus else {}
    node: Object = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"labels": {"kubernetes.io/hostname": NODE_KEY.name, "kubernetes.io/os": "linux"} | labels},
        "spec": {},
    }
    node["status"] = {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [{"type": "InternalIP", "address": ip}, {"type": "Hostname", "address": NODE_KEY.name}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now()}],
    }
    return node
