"""What a pod's `status` says: values in, values out."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fakekube.machine.objects import new_condition
from tests.fakekube.store import Object, now


@dataclass(slots=True, kw_only=True)
class ContainerState:
    """One container, as the kubelet knows it."""

    spec: Object
    is_init: bool
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: Object = field(default_factory=dict)
    num_restarts: int = 0
    is_started: bool = False
    """It runs, and its startup probe has succeeded."""
    is_probed_ready: bool = True
    """What the readiness probe says."""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def is_sidecar(self) -> bool:
        return self.is_init and self.spec.get("restartPolicy") == "Always"

    @property
    def is_ready(self) -> bool:
        if self.is_init and not self.is_sidecar:
            return self.exit_code == 0
        return self.is_started and self.is_probed_ready

    @property
    def exit_code(self) -> int | None:
        """None: it has not ended for good."""
        return int(self.state["terminated"]["exitCode"]) if "terminated" in self.state else None

    def wait(self, reason: str, message: str = "") -> None:
        self.state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}

    def run(self) -> None:
        self.state = {"running": {"startedAt": now()}}
        self.is_started = "startupProbe" not in self.spec
        self.is_probed_ready = "readinessProbe" not in self.spec

    def end(self, exit_code: int, reason: str = "") -> None:
        started = self.state.get("running", {}).get("startedAt", now())
        reason = reason or ("Completed" if exit_code == 0 else "Error")
        ended = {"exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": now()}
        self.state = {"terminated": ended}
        self.last_state = {"terminated": ended}
        self.is_started = False

    def restarts_after(self, exit_code: int, pod_policy: str) -> bool:
        if self.is_sidecar:
            return True
        # An init container that has done its work is not started again.
        policy = "OnFailure" if self.is_init and pod_policy == "Always" else pod_policy
        return policy == "Always" or (policy == "OnFailure" and exit_code != 0)

    def as_object(self) -> Object:
        found = {"name": self.name, "image": self.spec.get("image", ""), "imageID": self.spec.get("image", "")}
        last_state = self.last_state if "terminated" not in self.state else {}
        return found | {
            "ready": self.is_ready,
            "started": self.is_started,
            "restartCount": self.num_restarts,
            "state": self.state,
            "lastState": last_state,
        }


def status_of(pod: Object, containers: list[ContainerState], pod_ip: str, host_ip: str) -> Object:
    """A pod's whole `status`."""
    inits = [c for c in containers if c.is_init]
    mains = [c for c in containers if not c.is_init]
    is_initialized = all(c.is_started if c.is_sidecar else c.exit_code == 0 for c in inits)
    are_ready = is_initialized and all(c.is_ready for c in mains + [c for c in inits if c.is_sidecar])
    unready = f"containers with unready status: [{' '.join(c.name for c in mains if not c.is_ready)}]"
    why = ("", "") if are_ready else ("ContainersNotReady", unready)
    conditions = [
        new_condition(pod, "PodScheduled", True),
        new_condition(pod, "Initialized", is_initialized, "" if is_initialized else "ContainersNotInitialized"),
        new_condition(pod, "ContainersReady", are_ready, *why),
        new_condition(pod, "Ready", are_ready, *why),
    ]
    found = {
        "phase": _phase(pod["spec"].get("restartPolicy", "Always"), inits, mains),
        "conditions": conditions,
        "hostIP": host_ip,
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "startTime": (pod.get("status") or {}).get("startTime") or now(),
        "containerStatuses": [c.as_object() for c in mains],
    }
    return found | ({"initContainerStatuses": [c.as_object() for c in inits]} if inits else {})


def _phase(policy: str, inits: list[ContainerState], mains: list[ContainerState]) -> str:
    if policy == "Never" and any(c.exit_code for c in inits if not c.is_sidecar):
        return "Failed"
    codes = [c.exit_code for c in mains]
    ended = [
        code for c, code in zip(mains, codes, strict=True) if code is not None and not c.restarts_after(code, policy)
    ]
    if len(ended) == len(mains):
        return "Failed" if any(ended) else "Succeeded"
    has_begun = any("running" in c.state or c.last_state or c.num_restarts for c in mains)
    return "Running" if has_begun else "Pending"
