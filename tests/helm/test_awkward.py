"""Clusters and values that are unlike a laptop's: IPv6, wildcards, names that YAML reads as numbers, several nodes."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm import schemas
from tests.helm.chart import (
    CHART,
    MAJORS,
    MATRIX,
    Object,
    Pod,
    Values,
    every_values,
    of_kind,
    pod_of,
    pods,
    render,
    template,
    the,
)
from tests.helm.test_config import loaded

KUBERNETES = "1.35"
KIND = CHART.parents[1] / "deploy" / "kind" / "up.sh"


def settings_of(objects: tuple[Object, ...]) -> Object:
    """The rendered file of settings."""
    (found,) = (each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-config"))
    settings: Object = yaml.safe_load(found["data"]["baton.yaml"])
    return settings


def refusal(*sets: str, major: int = 4) -> str:
    """What helm says to values that it must refuse."""
    done = template(major, Values(sets=sets))
    assert done.returncode, "they were taken"
    return done.stderr


# IPv6


@pytest.mark.parametrize("major", MAJORS)
def test_a_cluster_with_ipv6_has_processes_that_listen_there(major: int, tmp_path: Path) -> None:
    sets = ("ipFamily=IPv6", "networkPolicy.apiServer.cidrs={::/0}")
    objects = render(Values(sets=sets), major)
    router = pod_of(objects, "router").spec["containers"][0]
    config = loaded(objects, router, tmp_path)
    hosts = {config.cluster.host, config.cluster.controller_host, config.telemetry.host}
    assert hosts == {"::"}
    assert "0.0.0.0" not in json.dumps(objects)
    cidrs = {peer["ipBlock"]["cidr"] for peer in api_server_peers(objects)}
    assert cidrs == {"::/0"}
    assert not [error for each in objects for error in schemas.errors(each, KUBERNETES)]


def test_a_cluster_with_ipv4_has_processes_that_listen_there(tmp_path: Path) -> None:
    objects = render()
    config = loaded(objects, pod_of(objects, "router").spec["containers"][0], tmp_path)
    assert {config.cluster.host, config.cluster.controller_host, config.telemetry.host} == {"0.0.0.0"}


def test_policies_let_the_controller_to_an_api_server_of_either_family() -> None:
    assert {peer["ipBlock"]["cidr"] for peer in api_server_peers(render())} == {"0.0.0.0/0", "::/0"}


def api_server_peers(objects: tuple[Object, ...]) -> list[Object]:
    """The blocks of addresses in policies."""
    rules = [rule for policy in of_kind(objects, "NetworkPolicy") for rule in policy["spec"].get("egress", [])]
    return [peer for rule in rules for peer in rule.get("to", []) if "ipBlock" in peer]


def test_redis_listens_on_addresses_of_both_families_as_far_as_there_are_any() -> None:
    for component in ("redis", "ray-store"):
        command = pod_of(render(), component).spec["containers"][0]["command"]
        at = command.index("--bind")
        assert command[at + 1 : at + 3] == ["*", "-::*"], "with a hyphen Redis starts without IPv6, too"


# Names


def test_wildcards_are_names_of_an_ingress_and_a_certificate() -> None:
    sets = (
        *("ingress.enabled=true", "ingress.host=*.example.com", "ingress.grpcHost=*.grpc.example.com"),
        *("ingress.tlsSecret=tls", "tls.issuer.name=ca", "tls.dnsNames={*.example.com}"),
        *("gateway.enabled=true", "gateway.parentRefs[0].name=a", "gateway.hostnames={*.a.example}"),
        "gateway.grpcHostnames={*.b.example}",
    )
    objects = render(Values(sets=sets))
    hosts = {rule["host"] for each in of_kind(objects, "Ingress") for rule in each["spec"]["rules"]}
    assert hosts == {"*.example.com", "*.grpc.example.com"}
    assert {host for each in of_kind(objects, "Ingress") for host in each["spec"]["tls"][0]["hosts"]} == hosts
    assert "*.example.com" in the(objects, "Certificate", "baton")["spec"]["dnsNames"]


ODD_NAMES = (
    *("pools.prefill.name=on", "pools.decode.name=12e3", "fullnameOverride=1e3", "nameOverride=y"),
    *("clusterSecret.existingSecret=yes", "ray.token.existingSecret=0123", "router.cacheSecret.existingSecret=0x1f"),
    *("redis.passwords.existingSecret=off", "ray.store.password.existingSecret=1.5", "huggingFace.existingSecret=no"),
    *(
        "router.tenants.existingSecret=n",
        "test.apiKey.existingSecret=2e2",
        "tls.existingSecret=3e3",
        "test.apiKey.key=1e1",
    ),
    *("modelCache.type=persistentVolumeClaim", "modelCache.existingClaim=4e4", "ray.store.existingClaim=5e5"),
    *("modelCache.prefetch.enabled=true", "serviceAccount.existing=6e6", "serviceAccount.existingHead=8e8"),
    *("serviceAccount.existingController=7e7", "worker.priorityClassName=on", "worker.runtimeClassName=off"),
    *("worker.schedulerName=yes", "router.priorityClassName=1e9", "clusterSecret.key=on", "ray.token.key=1e2"),
    *("router.tenants.key=yes", "router.cacheSecret.key=no", "ray.store.password.key=1e4", "huggingFace.key=1e5"),
    *(
        "image.router.tag=1e6",
        "image.worker.tag=1e7",
        "ingress.enabled=true",
        "ingress.host=1e8",
        "ingress.tlsSecret=on",
    ),
    *("ingress.className=off", "commonLabels.team=on", "commonLabels.cost=12e3", "router.podLabels.tier=yes"),
    *("pools.decode.keda.enabled=true", "pools.decode.keda.serverAddress=on", "pools.prefill.hpa.enabled=true"),
    *("config.autoscale.enabled=true", "config.autoscale.dry_run=true", "config.autoscale.max_workers=8"),
    *("monitoring.serviceMonitor.enabled=true", "monitoring.serviceMonitor.labels.release=on"),
)
"""DNS names, every one of them, that YAML without quotes reads as numbers or as true and false."""


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("orchestrator", ["deployments", "kuberay"])
def test_names_stay_names_whatever_yaml_reads_in_them(major: int, orchestrator: str) -> None:
    sets = (*ODD_NAMES, f"orchestrator={orchestrator}")
    objects = render(Values(sets=sets, name="99e9"), major)
    wrong = [(each["kind"], error) for each in objects for error in schemas.errors(each, KUBERNETES)]
    for pod in pods(objects):
        if pod.in_raycluster:
            wrong += [(pod.owner, error) for error in schemas.template_errors(pod.template, KUBERNETES)]
    assert not wrong
    assert {each["metadata"]["name"] for each in of_kind(objects, "ServingPool")} == {"on", "12e3"}
    names = {
        name for each in of_kind(objects, "Role") for rule in each["rules"] for name in rule.get("resourceNames", [])
    }
    assert {"on", "12e3"} <= names


def test_yaml_would_read_those_names_as_something_else() -> None:
    """Else the test above could not fail."""
    assert all(not isinstance(yaml.safe_load(name), str) for name in ("on", "off", "yes", "no", "0123", "1.5", "0x1f"))


LABELS = (
    *("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"),
    *("app.kubernetes.io/part-of", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"),
    "baton.dev/pool",
)


@pytest.mark.parametrize("label", LABELS)
def test_labels_of_the_chart_s_own_are_nobody_else_s(label: str) -> None:
    escaped = label.replace(".", r"\.")
    for place in ("commonLabels", "router.podLabels", "pools.decode.podLabels", "ray.store.podLabels"):
        assert f"{place} has {label}, which the chart sets itself" in refusal(f"{place}.{escaped}=x")


def test_a_label_of_several_values_is_there_once_and_the_most_special_one_wins() -> None:
    sets = ("commonLabels.release=everywhere", "monitoring.serviceMonitor.labels.release=prometheus")
    text = template(4, Values(sets=(*sets, "monitoring.serviceMonitor.enabled=true"))).stdout
    for document in text.split("\n---\n"):
        for block in re.findall(r"labels:\n((?:\s+\S+: .*\n)+)", document):
            names = [line.partition(": ")[0] for line in block.splitlines()]
            assert len(names) == len(set(names)), document
    objects = render(Values(sets=(*sets, "monitoring.serviceMonitor.enabled=true")))
    assert the(objects, "ServiceMonitor", "baton")["metadata"]["labels"]["release"] == "prometheus"


@every_values
def test_a_pool_s_default_name_is_the_release_s(values: Values) -> None:
    """So that a second release of the same namespace needs no values."""
    objects = render(values)
    full = settings_of(objects)["cluster"]["name"]
    named = "pools.decode.name=big" in values.sets
    found = {each["spec"]["role"]: each["metadata"]["name"] for each in of_kind(objects, "ServingPool")}
    assert found == {"prefill": f"{full}-prefill", "decode": "big" if named else f"{full}-decode"}
    kubernetes = settings_of(objects)["kubernetes"]
    assert {role: kubernetes[f"{role}_pool"] for role in found} == found


def test_two_releases_of_a_namespace_share_no_object() -> None:
    one, other = (
        {(each["kind"], each["metadata"]["name"]) for each in render(Values(name=name, sets=MATRIX["monitoring"].sets))}
        for name in ("one", "other")
    )
    assert not one & other


# Volumes, times, devices


def test_a_claim_for_one_node_is_refused_unless_there_is_one_node() -> None:
    claim = ("modelCache.type=persistentVolumeClaim", "modelCache.accessModes={ReadWriteOnce}")
    assert "modelCache.accessModes is ReadWriteOnce" in refusal(*claim)
    assert "modelCache.oneNode=true" in refusal(*claim)
    objects = render(Values(sets=(*claim, "modelCache.oneNode=true")))
    assert the(objects, "PersistentVolumeClaim", "baton-models")["spec"]["accessModes"] == ["ReadWriteOnce"]
    render(Values(sets=(*claim, "modelCache.existingClaim=models")))  # which may be of any kind


def test_a_rollout_has_the_time_that_its_workers_have() -> None:
    deadlines = {
        each["metadata"]["name"]: each["spec"].get("progressDeadlineSeconds")
        for each in of_kind(render(Values(sets=("config.cluster.start_timeout_s=3600",))), "Deployment")
    }
    assert deadlines["baton-decode"] == deadlines["baton-prefill"] == 3600 + 600
    long = ("config.cluster.start_timeout_s=3600", "worker.progressDeadlineSeconds=1800")
    assert "worker.progressDeadlineSeconds (1800) is too short for pool prefill" in refusal(*long)
    own = ("pools.decode.progressDeadlineSeconds=9000",)
    assert the(render(Values(sets=own)), "Deployment", "baton-decode")["spec"]["progressDeadlineSeconds"] == 9000


@every_values
def test_a_pod_that_never_gets_ready_blocks_no_drain(values: Values) -> None:
    for budget in of_kind(render(values), "PodDisruptionBudget"):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", budget["metadata"]["name"]


# Settings of running pods


def copies(pod: Pod) -> list[str]:
    """The command of the container that copies the settings."""
    (found,) = (each["command"] for each in pod.containers if each["name"] == "settings")
    command: list[str] = found
    return command


@pytest.mark.parametrize("component", ["router", "controller", "decode"])
def test_a_pod_keeps_the_settings_with_which_it_has_started(component: str, tmp_path: Path) -> None:
    """An upgrade changes the ConfigMap, with names that `baton leave` of the release before would refuse."""
    objects = render()
    pod = pod_of(objects, component)
    release, own = tmp_path / "baton-release", tmp_path / "baton"
    release.mkdir()
    own.mkdir()
    command = [word.replace("/etc/", f"{tmp_path}/") for word in copies(pod)]
    (release / "baton.yaml").write_text("model: {id: before}\n")
    subprocess.run(command, check=True, timeout=30)
    (release / "baton.yaml").write_text("model: {id: after, unknown: 1}\n")
    subprocess.run(command, check=True, timeout=30)  # as when the node has started again
    assert (own / "baton.yaml").read_text() == "model: {id: before}\n"
    assert [path.name for path in own.iterdir()] == ["baton.yaml"]


@every_values
def test_no_process_reads_the_configmap_itself(values: Values) -> None:
    for pod in pods(render(values)):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        changing = {
            name for name, volume in volumes.items() if volume.get("configMap", {}).get("name", "").endswith("-config")
        }
        readers = [
            container["name"]
            for container in pod.containers
            if changing & {mount["name"] for mount in container.get("volumeMounts", [])}
        ]
        assert readers == (["settings"] if changing else [])
        if changing:
            names = [container["name"] for container in pod.spec["initContainers"]]
            assert all(names.index("settings") < names.index(name) for name in ("model", "check") if name in names)
            copier = next(each for each in pod.containers if each["name"] == "settings")
            written = [mount["name"] for mount in copier["volumeMounts"] if mount["mountPath"] == "/etc/baton"]
            assert "emptyDir" in volumes[written[0]]


# gRPC connections


def test_the_age_of_connections_is_the_user_s_if_he_wants() -> None:
    assert settings_of(render())["router"]["max_connection_age_s"] == 24, "0.8 of the 30 s until a router stops"
    sets = ("router.maxConnectionAgeSeconds=300", "router.preStopSeconds=15")
    assert settings_of(render(Values(sets=sets)))["router"]["max_connection_age_s"] == 300
    assert pod_of(render(Values(sets=sets)), "router").spec["containers"][0]["lifecycle"]["preStop"]["exec"][
        "command"
    ] == [*("sleep", "15")]


def test_load_balancers_have_time_to_forget_a_router() -> None:
    """Those of clouds take 15 to 30 s."""
    sleep, seconds = pod_of(render(), "router").spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (sleep, int(seconds) >= 30) == ("sleep", True)


# kind


def test_what_the_script_for_kind_tells_people_to_run_is_there(tmp_path: Path) -> None:
    """The script runs with programs that only note their arguments; the chart is rendered with those that helm got."""
    noted = tmp_path / "noted"
    for program in ("docker", "kind", "helm", "kubectl"):
        file = tmp_path / program
        file.write_text(f'#!/bin/sh\nprintf "%s\\n" "{program} $*" >> {noted}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(KIND)], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (installed,) = (line.split() for line in noted.read_text().splitlines() if line.startswith("helm "))
    name, chart = installed[3:5]
    assert (installed[:3], CHART.parents[1] / chart) == (["helm", "upgrade", "--install"], CHART)
    (values,) = (word for word, before in zip(installed[1:], installed, strict=False) if before == "--values")
    sets = tuple(word for word, before in zip(installed[1:], installed, strict=False) if before == "--set")
    objects = render(Values(Path(values).stem.removeprefix("values-"), sets, name))
    (command,) = (line.split() for line in done.stdout.splitlines() if "port-forward" in line)
    assert command[command.index("-n") + 1] == installed[installed.index("--namespace") + 1]
    (target,) = (word.partition("/") for word in command if "/" in word)
    assert target[0] == "service"
    offered = {port["port"] for port in the(objects, "Service", target[2])["spec"]["ports"]}
    asked = {int(word.partition(":")[2]) for word in command if re.fullmatch(r"\d+:\d+", word)}
    assert asked == offered == {50051, 8000}
