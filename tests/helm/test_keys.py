"""The members' keys: each process has those of its own member, and the secret from which they are made is in none."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.errors import ConfigError
from baton.trust import Principal, load_keys, read_private
from deploy.cli.app import app
from tests.helm.chart import MATRIX, Object, Pod, Values, every_values, pod_of, pods, render, the

OPERATOR = "/run/baton-operator-keys"
MEMBERS = {
    "router": {"/run/baton-keys": "router"},
    "controller": {"/run/baton-keys": "controller"},
    **{pool: {"/run/baton-keys": "worker", OPERATOR: "operator"} for pool in ("prefill", "decode", "worker")},
}
"""Component -> folder of keys -> whose they are."""


def mounts(container: Object) -> dict[str, Object]:
    return {mount["name"]: mount for mount in container.get("volumeMounts", [])}


def writers(pod: Pod) -> list[Object]:
    """The containers that make keys."""
    return [each for each in pod.containers if each.get("command", [])[:2] == ["baton", "keys"]]


@every_values
def test_the_secret_is_where_keys_are_made_and_nowhere_else(values: Values) -> None:
    objects = render(values)
    name = "cluster" if "clusterSecret" in str(values.sets) else f"{fullname(objects)}-cluster"
    for pod in pods(objects):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        secret = [volume for volume in volumes.values() if volume.get("secret", {}).get("secretName") == name]
        assert bool(secret) == (pod.component in MEMBERS)
        for container in pod.containers:
            assert (mounts(container).keys() & {volume["name"] for volume in secret} != set()) == (
                container in writers(pod)
            )
        for volume in secret:
            assert volume["secret"]["defaultMode"] == 0o440, "everybody else may not read it"


def fullname(objects: tuple[Object, ...]) -> str:
    (router,) = (
        each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-router")
    )
    return str(router["metadata"]["name"]).removesuffix("-router")


@every_values
def test_a_process_has_the_keys_of_its_own_member(values: Values) -> None:
    objects = render(values)
    seen = set()
    for pod in pods(objects):
        made = {each["name"]: each["command"][each["command"].index("--role") + 1] for each in writers(pod)}
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        assert all(volumes[name]["emptyDir"]["medium"] == "Memory" for name in made), "on no disk"
        for container in pod.containers:
            if container in writers(pod):
                continue
            found = {mount["mountPath"]: made[name] for name, mount in mounts(container).items() if name in made}
            variables = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
            is_member = "BATON_CLUSTER_SECRET" in variables
            wanted = MEMBERS[pod.component] if is_member else {}
            if container["name"] == "check":
                wanted = {folder: member for folder, member in wanted.items() if folder != OPERATOR}
            assert found == wanted, (pod.owner, container["name"])
            assert variables.get("BATON_CLUSTER_SECRET") in (None, "/run/baton-keys/keys")
            assert all(mounts(container)[name]["readOnly"] for name in made.keys() & mounts(container).keys())
            seen |= {(pod.component, container["name"])} if is_member else set()
    assert {("router", "router"), ("controller", "controller")} <= seen
    assert ("controller", "ray") not in seen, "a Ray node is no member"


@pytest.mark.parametrize("component", ["router", "controller", "decode"])
def test_what_is_made_are_the_keys_of_that_member_alone(component: str, tmp_path: Path) -> None:
    """The containers' own commands, with this machine's paths, and the secret that the chart has drawn."""
    objects = render()
    secret = tmp_path / "secret"
    secret.write_bytes(base64.b64decode(the(objects, "Secret", "baton-cluster")["data"]["cluster-secret"]))
    secret.chmod(0o440)
    for writer in writers(pod_of(objects, component)):
        command = [word for word in writer["command"][1:] if word != "--follow"]
        at = command.index("--out") + 1
        member = Principal(MEMBERS[component][command[at].rpartition("/")[0]])
        command[at] = str(tmp_path / member)
        command = [str(secret) if word == "/etc/baton-cluster/secret" else word for word in command]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        text = read_private(tmp_path / member)
        assert load_keys(text, member, "").principal is member
        for other in set(Principal) - {member}:
            with pytest.raises(ConfigError):
                load_keys(text, other, "")
        assert secret.read_text() not in text


@pytest.mark.parametrize("component", ["router", "controller", "decode"])
def test_keys_follow_the_secret_where_kubernetes_has_sidecars(component: str) -> None:
    """In the controller's pod containers see each other's processes, and the secret in what theirs have open."""
    for kube, has_sidecars in (("1.29.0", True), ("1.28.0", False)):
        pod = pod_of(render(Values(kube=kube)), component)
        follows = has_sidecars and not pod.spec.get("shareProcessNamespace")
        assert follows or component == "controller" or not has_sidecars
        found = [("--follow" in each["command"], each.get("restartPolicy")) for each in writers(pod)]
        assert set(found) == {(True, "Always") if follows else (False, None)}
        assert pod.containers[: len(found)] == writers(pod), "before all who need them"


def test_who_leaves_does_so_as_an_operator() -> None:
    command = pod_of(render(), "decode").spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["env", f"BATON_CLUSTER_SECRET={OPERATOR}/keys", "baton"]


def test_a_machine_that_starts_commands_slowly_takes_no_pod_out_of_its_service() -> None:
    """The writer of keys became unready after one second and three failures, and no client reached its router."""
    sidecars = [each for pod in pods(render(MATRIX["defaults"])) for each in writers(pod) if "readinessProbe" in each]
    assert sidecars
    for probe in (each["readinessProbe"] for each in sidecars):
        assert probe["timeoutSeconds"] >= 5
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
