"""One pod's life: folders, init containers, containers with their probes and restarts, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakekube.machine import probes
from tests.fakekube.machine.environment import NotYet, variables
from tests.fakekube.machine.objects import (
    DEFAULT_GRACE_S,
    POD,
    SERVICE_ACCOUNT,
    is_deleted,
    key_of,
)
from tests.fakekube.machine.podstatus import ContainerState, status_of
from tests.fakekube.machine.processes import Process
from tests.fakekube.machine.translate import Translation, UnknownService, expand, image_name
from tests.fakekube.machine.volumes import PodFolder
from tests.fakekube.store import Missing, Object, Resource, Store

LOG_ANNOTATION = "baton.dev/test-log"
SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
MIN_SHUTDOWN_S = 2.0
"""A container has that long after its preStop hook, however long the hook took."""
MAX_BACKOFF = 10
"""Times the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a pod has of its machine."""

    store: Store
    node_name: str
    node_ip: str
    images: Mapping[str, list[str]]
    environment: Mapping[str, str]
    kubeconfig_of: Callable[[str], str | Path] | None
    backoff_s: float
    address_of: Callable[[str, str], str | None]
    claim_folder: Callable[[str, str], Path]
    """Of a namespace and a claim."""
    next_change: Callable[[], asyncio.Event]
    """Set at the next change in the store."""
    report: Callable[[Object, str, str], None]
    """Writes an Event: of a pod, a reason and a message."""
    started: Callable[[Process], None]
    """Told of each process."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a container, and what is started beside it."""

    argv: list[str]
    environment: dict[str, str]
    cwd: Path
    translation: Translation


class Container(ContainerState):
    """A container's state, and its process."""

    def __init__(self, spec: Object, is_init: bool, log: Path) -> None:
        super().__init__(spec=spec, is_init=is_init)
        self.log = log
        self.launch: Launch | None = None
        self.process: Process | None = None
        self.has_started = asyncio.Event()
        """Its startup probe has succeeded, once."""

    @property
    def lives(self) -> bool:
        return self.process is not None and not self.process.ended.is_set()


class Pod:
    """Its processes, from the first to the last."""

    def __init__(self, pod: Object, ip: str, folder: Path, logs: Path, machine: Environment) -> None:
        self.key = key_of(POD, pod)
        self.uid: str = pod["metadata"]["uid"]
        self.ip = ip
        self._pod = pod
        self._machine = machine
        self._logs = logs
        self._inits = [self._container(spec, True) for spec in pod["spec"].get("initContainers") or []]
        self._mains = [self._container(spec, False) for spec in pod["spec"]["containers"]]
        self._folder = PodFolder(folder, self._lookup, lambda name: machine.claim_folder(self.key.namespace, name))
        self._life: asyncio.Task[None] | None = None
        self.is_ending = False

    @property
    def containers(self) -> list[Container]:
        return [*self._inits, *self._mains]

    async def live(self) -> None:
        """Until its containers have ended for good, or until `end`."""
        self._annotate()
        self._say()
        self._life = asyncio.create_task(self._run_containers())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self._life)

    async def end(self, grace_s: float) -> None:
        """preStop, SIGTERM, SIGKILL; then nothing of it is left. The object is the caller's."""
        self.is_ending = True
        await self._stop_living()
        deadline = time.monotonic() + grace_s
        await asyncio.gather(*(self._end(c, deadline) for c in self.containers if not c.is_sidecar))
        for sidecar in reversed([c for c in self._inits if c.is_sidecar]):
            await self._end(sidecar, deadline)
        self._folder.remove()

    async def kill(self) -> None:
        """Ends it without a word."""
        self.is_ending = True
        await self._stop_living()
        for container in self.containers:
            if container.process is not None:
                await container.process.kill()
        self._folder.remove()

    async def _stop_living(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])

    async def _run_containers(self) -> None:
        async with asyncio.TaskGroup() as sidecars:
            running = []
            for container in self._inits:
                if container.is_sidecar:
                    running.append(sidecars.create_task(self._keep(container)))
                    await container.has_started.wait()
                elif await self._keep(container) != 0:
                    break  # restartPolicy Never: the pod has failed
            else:
                await asyncio.gather(*(self._keep(container) for container in self._mains))
            for task in running:
                task.cancel()
        deadline = time.monotonic() + self._pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
        for sidecar in reversed([c for c in self._inits if c.is_sidecar]):
            await self._end(sidecar, deadline)

    async def _keep(self, container: Container) -> int:
        """Starts a container as often as its policy wants it. Returns the last exit status."""
        policy = self._pod["spec"].get("restartPolicy", "Always")
        while True:
            exit_code = await self._run_once(container)
            if not container.restarts_after(exit_code, policy):
                self._say()
                return exit_code
            pause_s = self._machine.backoff_s * min(MAX_BACKOFF, 2**container.num_restarts)
            container.num_restarts += 1
            message = f"back-off {pause_s:g}s restarting failed container={container.name} pod={self.key.name}"
            container.wait("CrashLoopBackOff", message)
            self._say()
            self._machine.report(self._pod, "BackOff", message)
            await asyncio.sleep(pause_s)

    async def _run_once(self, container: Container) -> int:
        """From its start to its end. Unhealthy containers are ended."""
        container.launch = await self._prepared(container)
        try:
            container.process = self._start(container.launch, container.launch.argv, container.log)
        except OSError as error:
            container.log.write_text(f"{error}\n")
            container.end(128, "StartError")
            return 128
        container.run()
        self._say()
        ended = asyncio.create_task(container.process.ended.wait())
        watched = asyncio.create_task(self._watch(container))
        try:
            await asyncio.wait({ended, watched}, return_when=asyncio.FIRST_COMPLETED)
            if watched.done():
                watched.result()  # it has not come to nothing of itself
                await self._end(container, time.monotonic() + self._grace_of(container))
            exit_code = await container.process.finish()
        finally:
            await _over(ended, watched)
        container.end(exit_code)
        return exit_code

    async def _prepared(self, container: Container) -> Launch:
        """Waits until all that the container needs is there."""
        while True:
            change = self._machine.next_change()
            try:
                return self._launch(container)
            except NotYet as error:
                if container.state.get("waiting", {}).get("message") != error.message:
                    container.wait(error.reason, error.message)
                    self._say()
                    self._machine.report(self._pod, "Failed", error.message)
            await change.wait()

    def _launch(self, container: Container) -> Launch:
        """Raises NotYet."""
        paths = self._machine.images.get(image_name(container.spec.get("image", "")))
        if paths is None:
            raise NotYet("ErrImagePull", f"no such image: {container.spec.get('image')}")
        pod = self._machine.store.get(self.key) | {"status": self._status()}
        folders = self._folder.of(pod, container.spec)
        translation = Translation(self.ip, folders.mounts, self._machine.address_of)
        raw = variables(container.spec, pod, self._lookup)
        argv = [*(container.spec.get("command") or []), *(container.spec.get("args") or [])]
        if not argv:
            raise NotYet("CreateContainerError", "no command specified")
        environment = {
            "PATH": ":".join([*paths, *SYSTEM_PATH]),
            "HOME": str(folders.home),
            "TMPDIR": str(folders.tmp),
            "LANG": "C.UTF-8",
            "HOSTNAME": self.key.name,
            "MACHINE_POD_IP": self.ip,
        }
        environment |= dict(self._machine.environment) | self._kubeconfig()
        try:
            self._folder.fill(pod, container.spec, translation)
            environment |= {name: translation.text(value) for name, value in raw.items()}
            argv = [translation.text(expand(word, raw)) for word in argv]
            cwd = Path(translation.text(container.spec.get("workingDir", "")) or folders.home)
        except UnknownService as error:
            raise NotYet("CreateContainerConfigError", str(error)) from None
        return Launch(argv, environment, cwd if cwd.is_dir() else folders.home, translation)

    def _kubeconfig(self) -> dict[str, str]:
        """The pod's way to the API, where it has its service account's token."""
        spec = self._pod["spec"]
        account = spec.get("serviceAccountName") or "default"
        mounts = spec.get("automountServiceAccountToken")
        if mounts is None:
            with contextlib.suppress(Missing):
                mounts = self._lookup(SERVICE_ACCOUNT, account).get("automountServiceAccountToken")
        if mounts is False or self._machine.kubeconfig_of is None:
            return {}
        return {"KUBECONFIG": str(self._machine.kubeconfig_of(f"system:serviceaccount:{self.key.namespace}:{account}"))}

    async def _watch(self, container: Container) -> None:
        """Runs a container's postStart hook and its probes. Returns when it is to be ended for what they say."""
        hook = (container.spec.get("lifecycle") or {}).get("postStart")
        if hook is not None and not await self._hook(container, "postStart", hook, DEFAULT_GRACE_S):
            return
        if "startupProbe" in container.spec:
            if not await self._probe(container, "startup"):
                return
            container.is_started = True
            self._say()
        container.has_started.set()
        probing = [
            self._probe(container, kind) for kind in ("readiness", "liveness") if f"{kind}Probe" in container.spec
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(probe) for probe in probing] or [group.create_task(_for_ever())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def _probe(self, container: Container, kind: str) -> bool:
        """Asks on and on. Returns True when it has started (startup), False when it must be ended (startup, liveness);
        never for readiness."""
        probe = container.spec[f"{kind}Probe"]
        threshold = probes.Threshold.of(probe, is_good=kind == "liveness")
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            asked = time.monotonic()
            success = await self._asked(container, kind, probe)
            if threshold.seen(success):
                if kind == "readiness":
                    container.is_probed_ready = threshold.is_good
                    self._say()
                elif kind == "startup" or not threshold.is_good:
                    return threshold.is_good
            await asyncio.sleep(max(0.0, asked + probe.get("periodSeconds", 10) - time.monotonic()))

    async def _asked(self, container: Container, kind: str, probe: Object) -> bool:
        try:
            await probes.ask(
                probe, container.spec, self.ip, self._beside(container, None), probe.get("timeoutSeconds", 1)
            )
        except probes.Failed as error:
            self._machine.report(self._pod, "Unhealthy", f"{kind.capitalize()} probe failed: {error}")
            return False
        return True

    async def _end(self, container: Container, deadline: float) -> None:
        """preStop, SIGTERM, and at the deadline SIGKILL to all that is left."""
        process = container.process
        if process is None:
            return
        if not process.ended.is_set():
            self._machine.report(self._pod, "Killing", f"Stopping container {container.name}")
            hook = (container.spec.get("lifecycle") or {}).get("preStop")
            if hook is not None and deadline > time.monotonic():
                await self._before_stop(container, process, hook, deadline)
            process.terminate()
            kill_at = max(deadline, time.monotonic() + MIN_SHUTDOWN_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(kill_at - time.monotonic()):
                    await process.ended.wait()
        await process.kill()

    async def _before_stop(self, container: Container, process: Process, hook: Object, deadline: float) -> None:
        """Runs a preStop hook, until it or the container has ended."""
        limit_s = deadline - time.monotonic()
        hooked = asyncio.create_task(self._hook(container, "preStop", hook, limit_s))
        ended = asyncio.create_task(process.ended.wait())
        try:
            await asyncio.wait({hooked, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _over(hooked, ended)

    async def _hook(self, container: Container, name: str, hook: Object, limit_s: float) -> bool:
        run = self._beside(container, container.log.with_name(f"{container.name}.{name}"))
        try:
            await probes.ask(hook, container.spec, self.ip, run, limit_s)
        except probes.Failed as error:
            self._machine.report(self._pod, f"Failed{name[0].upper()}{name[1:]}Hook", f"{name} hook failed: {error}")
            return False
        return True

    def _beside(self, container: Container, log: Path | None) -> probes.Exec:
        """Runs commands as `kubectl exec` does. They end with their caller."""

        async def run(command: list[str]) -> int:
            assert container.launch is not None
            try:
                argv = [container.launch.translation.text(word) for word in command]
                process = self._start(container.launch, argv, log or Path("/dev/null"))
            except (OSError, UnknownService) as error:
                raise probes.Failed(str(error)) from error
            try:
                await process.ended.wait()
            finally:
                killing = asyncio.create_task(process.kill())
                await _seen_through(killing)  # the pod may end while a probe whose time is over is killed
            return killing.result()

        return run

    def _start(self, launch: Launch, argv: list[str], log: Path) -> Process:
        process = Process(argv, launch.environment, launch.cwd, log)
        self._machine.started(process)
        return process

    def _grace_of(self, container: Container) -> float:
        """Of an unhealthy container."""
        of_pod = self._pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
        return float((container.spec.get("livenessProbe") or {}).get("terminationGracePeriodSeconds", of_pod))

    def _status(self) -> Object:
        return status_of(self._pod, list(self.containers), self.ip, self._machine.node_ip)

    def _say(self) -> None:
        """Writes the status. What is being deleted is not written to any more."""

        def change(pod: Object) -> None:
            if pod["metadata"]["uid"] == self.uid and not is_deleted(pod):
                pod["status"] = status_of(pod, list(self.containers), self.ip, self._machine.node_ip)

        with contextlib.suppress(Missing):
            self._pod = self._machine.store.modify(self.key, change)

    def _annotate(self) -> None:
        """Says where the logs are."""

        def change(pod: Object) -> None:
            if pod["metadata"]["uid"] == self.uid and not is_deleted(pod):
                paths = json.dumps({c.name: str(c.log) for c in self.containers})
                pod["metadata"]["annotations"] = (pod["metadata"].get("annotations") or {}) | {LOG_ANNOTATION: paths}

        with contextlib.suppress(Missing):
            self._machine.store.modify(self.key, change)

    def _container(self, spec: Object, is_init: bool) -> Container:
        log = self._logs / f"{spec['name']}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        return Container(spec, is_init, log)

    def _lookup(self, resource: Resource, name: str) -> Object:
        return self._machine.store.get(key_of(resource, {"metadata": {"namespace": self.key.namespace, "name": name}}))


async def _seen_through(future: asyncio.Future[Any]) -> None:
    """As `baton.tasks.seen_through`, of which this package, a stranger to the product, knows nothing."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _over(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks, and returns when they have ended, though it is cancelled itself meanwhile."""
    for task in tasks:
        task.cancel()
    await _seen_through(asyncio.gather(*tasks, return_exceptions=True))


async def _for_ever() -> bool:
    return await asyncio.Event().wait()
