"""What refers to something finds it: selectors, ports, names, keys, hosts, commands. Charts get these wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import typer.main

from deploy.cli.app import app
from deploy.ray_pools.actor import POOL_LABEL
from tests.helm.chart import (
    CHART,
    MATRIX,
    MONITORING,
    NAMESPACE,
    Object,
    Values,
    every_values,
    is_shared,
    jobs,
    of_kind,
    pod_of,
    pods,
    render,
    selects,
    the,
)


def foreign(values: Values) -> set[str]:
    """Names of what the user says is there."""
    named = re.compile(r"(?:existing\w*|tlsSecret|imagePullSecrets\[0\]\.name|parentRefs\[0\]\.name)=(.+)")
    return {match[1] for item in values.sets if (match := named.search(item))}


def names(objects: tuple[Object, ...], kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in of_kind(objects, kind)}


def ports_of(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


@every_values
def test_services_select_pods_that_have_their_ports(values: Values) -> None:
    objects = render(values)
    for service in of_kind(objects, "Service"):
        found = [pod for pod in pods(objects) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        assert len(found) == 1, service["metadata"]["name"]
        offered = {name for container in found[0].serving for name in ports_of(container)}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in offered


@every_values
def test_probes_ask_ports_that_the_container_has(values: Values) -> None:
    for pod in pods(render(values)):
        for container in pod.containers:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for kind in ("httpGet", "tcpSocket", "grpc"):
                    if asked := container.get(probe, {}).get(kind):
                        ports = ports_of(container)
                        assert asked["port"] in {*ports, *ports.values()}, (pod.owner, container["name"], probe)


@every_values
def test_configmaps_secrets_and_claims_are_there(values: Values) -> None:
    objects = render(values)
    others = foreign(values) | {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    for pod in pods(objects):
        for volume in pod.spec.get("volumes", []):
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names(objects, "ConfigMap")
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in names(objects, "PersistentVolumeClaim") | others
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"].get("items", [])}
                assert _has_keys(objects, volume["secret"]["secretName"], keys, others)
        for container in pod.containers:
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert _has_keys(objects, reference["name"], {reference["key"]}, others), variable
        for secret in pod.spec.get("imagePullSecrets", []):
            assert secret["name"] in others


def _has_keys(objects: tuple[Object, ...], name: str, keys: set[str], others: set[str]) -> bool:
    found = [each for each in of_kind(objects, "Secret") if each["metadata"]["name"] == name]
    return keys <= set(found[0]["data"]) if found else name in others


@every_values
def test_secrets_and_claims_are_used(values: Values) -> None:
    objects = render(values)
    used = json.dumps([pod.template for pod in [*pods(objects), *jobs(objects)]])
    for each in of_kind(objects, "Secret", "PersistentVolumeClaim", "ServiceAccount"):
        assert f'"{each["metadata"]["name"]}"' in used


@every_values
def test_volumes_and_mounts_belong_together(values: Values) -> None:
    for pod in pods(render(values)):
        volumes = [volume["name"] for volume in pod.spec.get("volumes", [])]
        mounted = {mount["name"] for container in pod.containers for mount in container.get("volumeMounts", [])}
        assert sorted(mounted) == sorted(volumes), pod.owner
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(set(paths)) == len(paths)
            variables = [variable["name"] for variable in container.get("env", [])]
            assert len(set(variables)) == len(variables)


@every_values
def test_service_accounts_roles_and_tokens_belong_together(values: Values) -> None:
    objects = render(values)
    users = {pod.spec["serviceAccountName"]: pod for pod in pods(objects)}
    assert set(users) <= names(objects, "ServiceAccount") | foreign(values)
    users |= {job.spec["serviceAccountName"]: job for job in jobs(objects)}
    bound = set()
    for binding in of_kind(objects, "RoleBinding"):
        bound.add(binding["roleRef"]["name"])
        for subject in binding["subjects"]:
            assert users[subject["name"]].spec["automountServiceAccountToken"] is True
            assert subject["namespace"] == NAMESPACE
    assert bound == names(objects, "Role")
    with_token = {pod.component for pod in pods(objects) if pod.spec["automountServiceAccountToken"]}
    assert with_token == {"controller", *(["head"] if of_kind(objects, "RayCluster") else [])}
    for job in jobs(objects):
        may_ask = job.spec["automountServiceAccountToken"]
        assert may_ask == (job.component in ("crds", "secrets"))
        assert job.spec["serviceAccountName"] in (names(objects, "ServiceAccount") if may_ask else {"default"})


@every_values
def test_the_role_names_what_is_there_and_asks_for_nothing_of_the_cluster_s(values: Values) -> None:
    objects = render(values)
    for each in of_kind(objects, "ClusterRole", "ClusterRoleBinding"):
        assert each["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade", "for as long as it takes"
    for role in of_kind(objects, "ClusterRole"):
        assert role["rules"] == [
            {
                "apiGroups": ["apiextensions.k8s.io"],
                "resources": ["customresourcedefinitions"],
                "resourceNames": ["servingpools.baton.dev"],
                "verbs": ["patch"],
            }
        ]
    kinds = {"servingpools": "ServingPool", "deployments": "Deployment", "secrets": "Secret"}
    kinds["poddisruptionbudgets"] = "PodDisruptionBudget"
    for role in of_kind(objects, "Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", []):
                    assert name in names(objects, kinds[resource.partition("/")[0]])


@every_values
def test_network_policies_select_every_pod_and_their_peers_are_there(values: Values) -> None:
    objects = render(values)
    policies = of_kind(objects, "NetworkPolicy")
    if not policies:
        assert "networkPolicy.enabled=false" in values.sets
    for policy in policies:
        all_pods = [*pods(objects), *jobs(objects)]
        selected = [pod for pod in all_pods if selects(policy["spec"]["podSelector"], pod.labels)]
        assert selected, policy["metadata"]["name"]
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for peer in [*rule.get("from", []), *rule.get("to", [])]:
                if "podSelector" in peer and "namespaceSelector" not in peer:
                    assert any(selects(peer["podSelector"], pod.labels) for pod in pods(objects))
            for port in rule.get("ports", []):
                if isinstance(port["port"], str):
                    assert all(any(port["port"] in ports_of(c) for c in pod.serving) for pod in selected)


@every_values
def test_budgets_select_every_serving_pod(values: Values) -> None:
    objects = render(values)
    budgets = of_kind(objects, "PodDisruptionBudget")
    for component in ("router", *(("worker",) if is_shared(values) else ("prefill", "decode"))):
        if component == "router" and "router.podDisruptionBudget.enabled=false" in values.sets:
            continue
        (budget,) = (b for b in budgets if selects(b["spec"]["selector"], pod_of(objects, component).labels))
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        whole = set(budget["spec"]) - {"selector", "unhealthyPodEvictionPolicy"}
        in_raycluster = pod_of(objects, component).in_raycluster
        # Of a RayCluster's pods, which have no scale subresource, Kubernetes takes nothing but a number that stays.
        assert whole == ({"minAvailable"} if in_raycluster else {"maxUnavailable"})
    for budget in budgets:
        assert any(selects(budget["spec"]["selector"], pod.labels) for pod in pods(objects))


@every_values
def test_autoscalers_have_targets_that_say_no_size(values: Values) -> None:
    objects = render(values)
    for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        reference = each["spec"]["scaleTargetRef"]
        target = the(objects, reference["kind"], reference["name"])
        assert target["apiVersion"] == reference["apiVersion"]
        assert "replicas" not in target["spec"]


@every_values
def test_no_size_of_a_pool_is_rendered(values: Values) -> None:
    """helm would set it back with every upgrade."""
    objects = render(values)
    pools = of_kind(objects, "ServingPool")
    assert len(pools) == 2
    groups = ("-prefill", "-decode", "-worker")
    workers = [d for d in of_kind(objects, "Deployment") if d["metadata"]["name"].endswith(groups)]
    assert len(workers) == (0 if of_kind(objects, "RayCluster") else 2 - is_shared(values))
    assert not [each["metadata"]["name"] for each in (*pools, *workers) if "replicas" in each["spec"]]


def test_ray_s_autoscaler_shares_the_folders_of_ray_s_head() -> None:
    """It is a container that KubeRay adds to the head's pod."""
    objects = render(MATRIX["kuberay"])
    (cluster,) = of_kind(objects, "RayCluster")
    mounts = cluster["spec"]["autoscalerOptions"]["volumeMounts"]
    ray = pod_of(objects, "head").spec["containers"][0]
    assert mounts
    assert all(mount in ray["volumeMounts"] for mount in mounts)


def test_a_new_raycluster_begins_with_the_initial_sizes() -> None:
    (cluster,) = of_kind(render(MATRIX["gpu-cluster-kuberay"]), "RayCluster")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert [groups[role]["replicas"] for role in ("prefill", "decode")] == [4, 4]
    for group in groups.values():
        # Quoted for the shell that KubeRay starts Ray in.
        assert json.loads(json.loads(group["rayStartParams"]["resources"].strip("'"))) == {"baton_worker": 1}


def test_ray_nodes_are_for_the_workers_of_their_pool() -> None:
    """And a group is large enough for all who ever begin there, whatever their role is now."""
    objects = render(MATRIX["cpu-deployments"])
    for role in ("prefill", "decode"):
        command = pod_of(objects, role).spec["containers"][0]["command"]
        assert f"--labels={POOL_LABEL}={role}" in command
    values = Values(sets=("orchestrator=kuberay", "pools.prefill.maxReplicas=3"))
    (cluster,) = of_kind(render(values), "RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["labels"] == {POOL_LABEL: group["groupName"]}
        assert "labels" not in group["rayStartParams"], "KubeRay refuses them there"
        assert group["maxReplicas"] == 3 + 8


@every_values
def test_monitors_find_the_routers_metrics(values: Values) -> None:
    objects = render(values)
    for monitor in of_kind(objects, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]
        (service,) = (s for s in of_kind(objects, "Service") if selects(selector, s["metadata"]["labels"]))
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    for monitor in of_kind(objects, "PodMonitor"):
        (pod,) = (pod for pod in pods(objects) if selects(monitor["spec"]["selector"], pod.labels))
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports_of(pod.spec["containers"][0])


@pytest.mark.parametrize(
    ("sets", "is_open"),
    [
        ((), False),
        (MONITORING, True),
        ((*MONITORING, "router.tenants.existingSecret=tenants"), False),
        ((*MONITORING, "networkPolicy.clients[0].podSelector.matchLabels.a=b"), False),
    ],
)
def test_metrics_name_the_tenants_so_only_named_peers_reach_them(sets: tuple[str, ...], is_open: bool) -> None:
    """Nor does who reaches the Service for clients."""
    peer = "networkPolicy.monitoring[0].podSelector.matchLabels.app=prometheus"
    for named, expected in (
        (sets, [{"namespaceSelector": {}}] if is_open else []),
        ((*sets, peer), [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]),
    ):
        objects = render(Values(sets=named))
        rules = [rule for policy in of_kind(objects, "NetworkPolicy") for rule in policy["spec"].get("ingress", [])]
        metrics = [rule for rule in rules if {"port": "metrics", "protocol": "TCP"} in rule.get("ports", [])]
        (peers,) = (rule["from"] for rule in metrics)
        assert selects(peers[0]["podSelector"], {**pod_of(objects, "router").labels, COMPONENT: "test"}), "helm test"
        assert peers[1:] == expected
        assert {port["name"] for port in the(objects, "Service", "baton")["spec"]["ports"]} == {"grpc", "http"}


def test_rules_and_dashboards_come_as_they_are() -> None:
    import yaml

    objects = render(MATRIX["monitoring"])
    rules = {path.stem: yaml.safe_load(path.read_text()) for path in (CHART / "rules").glob("*.yaml")}
    assert rules
    for stem, content in rules.items():
        assert the(objects, "PrometheusRule", f"baton-{stem}")["spec"] == content
    dashboards = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert dashboards
    maps = [m for m in of_kind(objects, "ConfigMap") if m["metadata"]["labels"].get("grafana_dashboard") == "1"]
    found = {name: text for each in maps for name, text in each["data"].items()}
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(text) for name, text in dashboards.items()
    }


def test_each_alert_leads_to_its_page_wherever_those_are() -> None:
    for name, page in (
        ("monitoring", "https://baton.example/docs/runbook/{}.md"),
        ("tls", "https://wiki.example/baton/{}?from=$1"),
    ):
        (rules,) = (
            each for each in of_kind(render(MATRIX[name]), "PrometheusRule") if "alerts" in each["metadata"]["name"]
        )
        alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
        assert len(alerts) > 30
        for each in alerts:
            assert each["annotations"]["runbook_url"] == page.format(each["alert"])


def test_what_the_runbook_names_is_in_the_chart() -> None:
    objects = [each for name in ("defaults", "tenants", "tls") for each in render(MATRIX[name])]
    named = {(each["kind"].lower(), each["metadata"]["name"].replace("baton", "RELEASE", 1)) for each in objects}
    containers = {container["name"] for pod in pods(tuple(objects)) for container in pod.containers}
    labels = {pod.component for pod in pods(tuple(objects))}
    pages = [*(CHART.parents[1] / "docs/runbook").glob("*.md"), CHART / "rules/alerts.yaml"]
    text = "\n".join(path.read_text() for path in pages)
    found = set(re.findall(r"\b(deployment|service|secret|certificate|networkpolicy)[/ ](RELEASE[\w-]*)", text))
    assert len(found) >= 8
    assert found <= named
    assert set(re.findall(r" -c ([a-z][\w-]*)", text)) <= containers
    assert set(re.findall(r"app\.kubernetes\.io/component=(\w+)", text)) <= labels


@every_values
def test_endpoints_lead_to_the_router(values: Values) -> None:
    objects = render(values)
    service = next(s for s in of_kind(objects, "Service") if s["metadata"]["labels"][COMPONENT] == "router")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for ingress in of_kind(objects, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            backend = rule["http"]["paths"][0]["backend"]["service"]
            assert backend["name"] == service["metadata"]["name"]
            assert ingress["metadata"]["name"].endswith(backend["port"]["name"])
            assert backend["port"]["name"] in ports
            assert [rule["host"]] == ingress["spec"]["tls"][0]["hosts"]
    pools = [
        {"group": "inference.networking.k8s.io", "kind": each["kind"], "name": each["metadata"]["name"]}
        for each in of_kind(objects, "InferencePool")
    ]
    for kind, port in (("HTTPRoute", ports["http"]), ("GRPCRoute", ports["grpc"])):
        for route in of_kind(objects, kind):
            backends = [{"name": service["metadata"]["name"], "port": port}]
            assert route["spec"]["rules"][0]["backendRefs"] == (pools if kind == "HTTPRoute" and pools else backends)
            assert ("timeouts" in route["spec"]["rules"][0]) == (kind == "HTTPRoute"), "a GRPCRoute has none"


COMPONENT = "app.kubernetes.io/component"


@every_values
def test_hosts_that_are_named_are_services_with_that_port(values: Values) -> None:
    objects = render(values)
    services = {
        (service["metadata"]["name"], port["port"])
        for service in of_kind(objects, "Service")
        for port in service["spec"]["ports"]
    }
    text = json.dumps([each for each in objects if each["kind"] != "Certificate"])  # whose names have no port
    hosts = re.findall(rf"([\w-]+)\.{NAMESPACE}\.svc:(\d+)", text)
    assert hosts
    assert {(name, int(port)) for name, port in hosts} <= services
    assert not re.search(r"\w\.svc(?!:\d)(?!\.)", text), "a Service without its port"


@every_values
def test_deployments_select_their_own_pods_alone(values: Values) -> None:
    objects = render(values)
    for deployment in of_kind(objects, "Deployment"):
        selector = deployment["spec"]["selector"]
        found = [pod.owner for pod in [*pods(objects), *jobs(objects)] if selects(selector, pod.labels)]
        assert found == [f"Deployment/{deployment['metadata']['name']}"]


@every_values
def test_names_and_labels_fit(values: Values) -> None:
    for each in render(values):
        assert len(each["metadata"]["name"]) <= 63
        for value in each["metadata"].get("labels", {}).values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value)
            assert len(value) <= 63


@every_values
def test_pods_of_workers_are_those_that_the_status_selects(values: Values) -> None:
    from types import SimpleNamespace

    from baton.cluster import Role
    from deploy.kubernetes.serving_pool import spec_of

    objects = render(values)
    for each in of_kind(objects, "ServingPool"):
        role = each["spec"]["role"]
        pool = SimpleNamespace(
            spec={**each["spec"], "replicas": 1},
            metadata=SimpleNamespace(labels=each["metadata"]["labels"], generation=1),
        )
        wanted = dict(item.split("=") for item in spec_of(Role(role), pool).selector.split(","))
        found = [pod.component for pod in pods(objects) if selects({"matchLabels": wanted}, pod.labels)]
        assert found == ([] if is_shared(values) else [role]), "a pod of both pools is neither's alone"


def _commands(objects: tuple[Object, ...]) -> Iterator[list[str]]:
    for pod in [*pods(objects), *jobs(objects)]:
        for container in pod.containers:
            yield container.get("command", [])
            yield container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])


@every_values
def test_commands_are_ones_that_baton_has(values: Values) -> None:
    group = typer.main.get_command(app)
    without_env = [command[2:] if command[:1] == ["env"] else command for command in _commands(render(values))]
    found = [command[1:] for command in without_env if command[:1] == ["baton"]]
    assert {"run", "leave", "generate", "keys"} <= {command[0] for command in found}
    for name, *arguments in found:
        command = group.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, list(arguments)).close()  # exits where an option is unknown


def test_grace_is_what_leaving_may_take() -> None:
    objects = render(MATRIX["gpu-cluster-deployments"])
    assert pod_of(objects, "router").spec["terminationGracePeriodSeconds"] == 30 + 300 + 10
    pod = pod_of(objects, "decode")
    command = pod.spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert int(command[command.index("--timeout") + 1]) == 120 + 900
    assert pod.spec["terminationGracePeriodSeconds"] == 120 + 900 + 30


RESTARTS: dict[str, set[str]] = {
    "config.router.max_in_flight=99": {"router"},
    "config.autoscale.cool_down_s=99": {"router", "controller"},
    "config.engine.block_size=32": {"router", "controller", "prefill", "decode"},
    "config.transfer.window=3": {"router", "controller", "prefill", "decode"},
    f"router.tenants.inline.acme.key_sha256[0]={'a' * 64}": {"router"},
    "router.replicas=5": set(),
    "pools.decode.maxReplicas=9": set(),
    "image.worker.tag=v2": {"head", "controller", "prefill", "decode"},
    "pools.decode.image.tag=v2": {"decode"},
    "pools.decode.sharedMemory=2Gi": {"decode"},
    "pools.decode.engine.max_num_seqs=8": {"router", "controller", "decode"},
    "pools.prefill.engine.kv_dtype=bfloat16": {"router", "controller", "prefill"},
    "worker.maxSurge=50%": {"router", "controller"},
}


def test_a_change_of_the_tenants_restarts_nothing() -> None:
    key = f"router.tenants.inline.acme.key_sha256[0]={'a' * 64}"
    before = render(Values(sets=(key,)))
    after = render(Values(sets=(key, "router.tenants.inline.acme.requests_per_minute=5")))
    assert pod_of(before, "router").template == pod_of(after, "router").template
    assert the(before, "Secret", "baton-tenants") != the(after, "Secret", "baton-tenants")


@pytest.mark.parametrize(("change", "restarted"), RESTARTS.items(), ids=RESTARTS)
def test_a_change_restarts_no_more_than_it_must(change: str, restarted: set[str]) -> None:
    before = render(Values())
    after = render(Values(sets=(change,)))
    deployments = [pod.component for pod in pods(before) if pod.owner.startswith("Deployment")]
    changed = {name for name in deployments if pod_of(before, name).template != pod_of(after, name).template}
    assert changed == restarted


def test_ray_s_head_and_its_nodes_wait_for_each_other_where_it_has_a_store() -> None:
    objects = render()
    waits = {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"}
    for component in ("head", "controller", "prefill", "decode"):
        nodes = [each for each in pod_of(objects, component).serving if "RAY_AUTH_MODE" in json.dumps(each["env"])]
        assert nodes
        assert all(waits in container["env"] for container in nodes)
    (ray,) = (each for each in pod_of(objects, "head").serving if each["name"] == "ray")
    values = {variable["name"]: variable.get("value") for variable in ray["env"]}
    assert values["RAY_REDIS_ADDRESS"] == "baton-ray-store.serving.svc:6379"
    assert "RAY_REDIS_ADDRESS" not in json.dumps(pod_of(objects, "decode").template)
    without = json.dumps(render(MATRIX["no-ray-store"]))
    assert "ray-store" not in without
    assert waits["name"] not in without


def test_the_controller_joins_ray_by_the_node_beside_it() -> None:
    """A driver looks among the processes that it sees, and would take the head's node if it saw that one."""
    pod = pod_of(render(), "controller")
    assert pod.spec["shareProcessNamespace"] is True
    node, driver = pod.serving
    assert (node["name"], driver["name"]) == ("ray", "controller")
    assert "--node-ip-address=$(POD_IP)" in node["command"]
    assert {"name": "BATON_CLUSTER_RAY_NODE_IP", "value": "$(POD_IP)"} in driver["env"]


def test_a_new_chart_version_alone_restarts_nothing() -> None:
    for pod in pods(render()):
        if pod.owner.startswith("Deployment"):
            assert "helm.sh/chart" not in pod.labels
            assert "app.kubernetes.io/version" not in pod.labels
