"""The node's kubelet: each pod of the store that is assigned to it lives here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.fakekube.machine.addresses import Addresses
from tests.fakekube.machine.objects import DEFAULT_GRACE_S, POD, is_deleted, key_of, name_of, phase_of
from tests.fakekube.machine.pod import Environment, Pod
from tests.fakekube.store import Key, Missing, Object


class Kubelet:
    def __init__(self, folder: Path, addresses: Addresses, machine: Environment, tasks: asyncio.TaskGroup) -> None:
        self._folder = folder
        self._addresses = addresses
        self._machine = machine
        self._tasks = tasks
        self._pods: dict[str, Pod] = {}
        """By uid."""
        self._numbers = itertools.count()

    def look(self, pods: list[Object]) -> None:
        """Starts what is new, ends what is being deleted, kills what is gone."""
        there = {pod["metadata"]["uid"] for pod in pods}
        for uid, lost in list(self._pods.items()):
            if uid not in there:
                del self._pods[uid]
                self._begin(lost.kill())
        for pod in pods:
            known = self._pods.get(pod["metadata"]["uid"])
            if known is None:
                self._take(pod)
            elif is_deleted(pod) and not known.is_ending:
                known.is_ending = True
                grace_s = pod["metadata"].get("deletionGracePeriodSeconds", DEFAULT_GRACE_S)
                self._begin(self._end(known, grace_s))

    async def kill_all(self) -> None:
        pods, self._pods = self._pods, {}
        await asyncio.gather(*(pod.kill() for pod in pods.values()))

    def _take(self, pod: Object) -> None:
        if is_deleted(pod):
            self._remove(key_of(POD, pod), pod["metadata"]["uid"])  # it has no processes
        elif pod["spec"].get("nodeName") == self._machine.node_name and phase_of(pod) not in ("Succeeded", "Failed"):
            ip = self._addresses.for_pod({known.ip for known in self._pods.values()})
            folder = self._folder / str(next(self._numbers))
            logs = self._folder / "logs" / f"{pod['metadata']['namespace']}.{name_of(pod)}"
            known = self._pods[pod["metadata"]["uid"]] = Pod(pod, ip, folder, logs, self._machine)
            self._begin(known.live())

    async def _end(self, pod: Pod, grace_s: float) -> None:
        await pod.end(grace_s)
        self._pods.pop(pod.uid, None)
        self._remove(pod.key, pod.uid)

    def _remove(self, key: Key, uid: str) -> None:
        with contextlib.suppress(Missing):
            if self._machine.store.get(key)["metadata"]["uid"] == uid:
                self._machine.store.delete(key, 0)

    def _begin(self, doing: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(doing)
