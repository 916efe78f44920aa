"""What a policy scanner asks of the rendered objects. The ids are checkov's, whose verdict these checks repeat.

`policy-baseline.txt` lists what stays, each with its reason; nothing else may be found, and nothing there may be gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.helm.chart import (
    MATRIX,
    OFTEN,
    Object,
    Pod,
    Values,
    every_values,
    jobs,
    of_kind,
    pod_of,
    pods,
    render,
    selects,
)

BASELINE = Path(__file__).parent / "policy-baseline.txt"
LINE = re.compile(r"(\w+) (\S+): (.+)")


def baseline() -> dict[tuple[str, str], str]:
    """(check, pattern of pods and containers) -> the reason."""
    lines = [line for line in BASELINE.read_text().splitlines() if line and not line.startswith("#")]
    return {(match[1], match[2]): match[3] for line in lines if (match := LINE.fullmatch(line))}


def findings(objects: tuple[Object, ...]) -> Iterator[tuple[str, str]]:
    for pod in [*pods(objects), *jobs(objects)]:
        name = f"{pod.spec.get('restartPolicy', 'Always')}/{pod.component}"
        yield from ((check, name) for check in _of_pod(pod))
        for container in pod.containers:
            if container["name"].startswith("extra-"):
                continue  # the user's own
            yield from ((check, f"{name}/{container['name']}") for check in _of_container(container, pod))


def _of_pod(pod: Pod) -> Iterator[str]:
    spec, context = pod.spec, pod.spec.get("securityContext", {})
    if spec.get("hostPID") or spec.get("hostIPC") or spec.get("hostNetwork"):
        yield "CKV_K8S_17"
    if spec.get("automountServiceAccountToken") is not False:
        yield "CKV_K8S_38"
    if not context.get("runAsNonRoot"):
        yield "CKV_K8S_23"
    if context.get("runAsUser", 0) < 10_000:
        yield "CKV_K8S_40"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "CKV_K8S_31"
    if any("hostPath" in volume for volume in spec.get("volumes", [])):
        yield "CKV2_K8S_HOSTPATH"


def _of_container(container: Object, pod: Pod) -> Iterator[str]:
    context, resources = container.get("securityContext", {}), container.get("resources", {})
    if context.get("runAsUser") == 0:
        yield "CKV_K8S_23"
    if context.get("privileged"):
        yield "CKV_K8S_16"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "CKV_K8S_20"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "CKV_K8S_22"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "CKV_K8S_28"
    if context.get("capabilities", {}).get("add"):
        yield "CKV_K8S_25"
    asked = {
        "CKV_K8S_10": ("requests", "cpu"),
        "CKV_K8S_11": ("limits", "cpu"),
        "CKV_K8S_12": ("requests", "memory"),
        "CKV_K8S_13": ("limits", "memory"),
    }
    for check, (kind, what) in asked.items():
        if what not in resources.get(kind, {}):
            yield check
    if container in pod.serving:
        probes = {"CKV_K8S_8": "livenessProbe", "CKV_K8S_9": "readinessProbe", "STARTUP": "startupProbe"}
        yield from (check for check, probe in probes.items() if probe not in container)
    if re.search(r":latest$|^[^:@]+$", container["image"]):
        yield "CKV_K8S_14"
    if container["imagePullPolicy"] != "Always":
        yield "CKV_K8S_15"
    if "@sha256:" not in container["image"]:
        yield "CKV_K8S_43"
    if any("secretKeyRef" in variable.get("valueFrom", {}) for variable in container.get("env", [])):
        yield "CKV_K8S_35"


@every_values
def test_nothing_is_found_beyond_the_baseline(values: Values) -> None:
    known = baseline()
    new = {
        (check, where)
        for check, where in findings(render(values))
        if not any(check == known_check and fnmatchcase(where, pattern) for known_check, pattern in known)
    }
    assert not new


def test_everything_in_the_baseline_is_found_somewhere() -> None:
    gone = set(baseline())
    for name in sorted(MATRIX, key=lambda name: name not in OFTEN):
        found = set(findings(render(MATRIX[name]))) if gone else set()
        gone = {
            (check, pattern)
            for check, pattern in gone
            if not any(check == found_check and fnmatchcase(where, pattern) for found_check, where in found)
        }
    assert not gone
    assert len(baseline()) == sum(LINE.fullmatch(line) is not None for line in BASELINE.read_text().splitlines())


@every_values
def test_what_stops_has_time_to(values: Values) -> None:
    for pod in pods(render(values)):
        for container in pod.spec["containers"]:
            command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
            if command:
                assert pod.spec["terminationGracePeriodSeconds"] > int(command[-1]) + 5, pod.owner


def test_routers_and_workers_have_something_to_do_before_they_stop() -> None:
    for name in ("defaults", "kuberay"):
        for component in ("router", "prefill", "decode"):
            assert "preStop" in pod_of(render(MATRIX[name]), component).spec["containers"][0]["lifecycle"]


@every_values
def test_policies_close_every_pod_both_ways(values: Values) -> None:
    objects = render(values)
    policies = of_kind(objects, "NetworkPolicy")
    if not policies:
        return  # switched off
    for pod in [*pods(objects), *jobs(objects)]:
        closed = {
            way
            for policy in policies
            if selects(policy["spec"]["podSelector"], pod.labels)
            for way in policy["spec"]["policyTypes"]
        }
        assert closed == {"Ingress", "Egress"}, pod.owner


@pytest.mark.parametrize(
    ("orchestrator", "who"), [("deployments", {"controller"}), ("kuberay", {"controller", "head"})]
)
def test_nobody_else_reaches_the_api_server(orchestrator: str, who: set[str]) -> None:
    """Under KubeRay, Ray's autoscaler is in the head's pod."""
    objects = render(Values(sets=("networkPolicy.modelDownloads=false", f"orchestrator={orchestrator}")))
    with_api = {
        pod.component
        for pod in pods(objects)
        for policy in of_kind(objects, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], pod.labels)
        and any(port["port"] == 6443 for rule in policy["spec"].get("egress", []) for port in rule.get("ports", []))
    }
    assert with_api == who


def test_no_secret_of_the_chart_s_is_guessable() -> None:
    import base64

    drawn = [
        base64.b64decode(value)
        for _ in range(2)
        for major in (3, 4)
        for secret in of_kind(_fresh(major), "Secret")
        for value in secret["data"].values()
    ]
    assert len(drawn) == len(set(drawn)) == 4 * 8
    assert all(len(value) >= 32 for value in drawn)


def _fresh(major: int) -> tuple[Object, ...]:
    render.cache_clear()
    return render(Values(), major)
