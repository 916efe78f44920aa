"""Releases with routers and releases with models: one of the first and three of the second, in two namespaces."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.config import Config
from tests.helm import schemas
from tests.helm.chart import (
    CHART,
    MAJORS,
    NAMESPACE,
    Object,
    Pod,
    Values,
    documents,
    helm,
    jobs,
    of_kind,
    pod_of,
    pods,
    render,
    template,
    the,
)
from tests.helm.reach import Place, labels_of, place_of, reaches
from tests.helm.test_config import environment, loaded
from tests.helm.test_reach import STRANGER

TEAM = "team"
"""Namespace of a model that is apart from the routers."""
JOINED = ("parts.door=false", "door.release=baton")
DOOR = Values(
    sets=(
        "parts.model=false",
        f"networkPolicy.modelNamespaces[0]={TEAM}",
        "networkPolicy.clients[0].podSelector.matchLabels.app=page",
    )
)
QWEN = Values(name="qwen", sets=(*JOINED, "config.model.id=org/qwen", "config.model.share=9"))
KUBERAY = Values(name="phi", sets=(*JOINED, "config.model.id=org/phi", "orchestrator=kuberay"))
LLAMA = Values(
    name="llama",
    namespace=TEAM,
    sets=(
        *JOINED,
        f"door.namespace={NAMESPACE}",
        *("clusterSecret.existingSecret=endpoint-keys", "redis.passwords.existingSecret=endpoint-redis"),
        *("config.model.id=org/llama", "config.model.served_name=llama"),
    ),
)
MODELS = {"qwen": QWEN, "phi": KUBERAY, "llama": LLAMA}
KEPT = {
    "endpoint-keys": ("baton-cluster", ("cluster-secret",)),
    "endpoint-redis": ("baton-redis", ("worker", "controller")),
}
"""Copy in the other namespace -> the Secret, and what an operator copies of it."""
OF_DOOR = {"router", "redis", "test"}
OF_MODEL = {"controller", "head", "prefill", "decode", "ray-store", "test"}
OBJECTS_OF_ONE_RELEASE = """
ConfigMap: baton-config baton-ray-store-rules baton-redis-rules
Deployment: baton-controller baton-decode baton-head baton-prefill baton-ray-store baton-redis baton-router
NetworkPolicy: baton baton-controller baton-head baton-names baton-outside baton-ray-store baton-redis baton-router
  baton-test baton-workers
PodDisruptionBudget: baton-decode baton-prefill baton-router
Role: baton-controller
RoleBinding: baton-controller
Secret: baton-cluster baton-ray baton-ray-store baton-redis baton-router
Service: baton baton-head baton-ray-store baton-redis
ServiceAccount: baton baton-controller baton-head
ServingPool: baton-decode baton-prefill
"""
"""What a release of both parts has had. Under another name an object would be a new one, and the old one deleted."""


@cache
def everything() -> tuple[Object, ...]:
    """The objects of all four releases, with the operator's copies of Secrets."""
    found = tuple(each for values in (DOOR, *MODELS.values()) for each in render(values))
    copies = []
    for name, (source, keys) in KEPT.items():
        data = the(found, "Secret", source)["data"]
        metadata = {"name": name, "namespace": TEAM}
        copies.append({"kind": "Secret", "metadata": metadata, "data": {key: data[key] for key in keys}})
    return (*found, *copies)


def inside(namespace: str) -> tuple[Object, ...]:
    return tuple(each for each in everything() if each["metadata"].get("namespace") == namespace)


def config_of(values: Values, pod: Pod, name: str, folder: Path) -> Config:
    (container,) = (each for each in pod.containers if each["name"] == name)
    secrets = tuple(of_kind(inside(values.namespace), "Secret"))
    return loaded((*of_kind(render(values), "ConfigMap"), *secrets), container, folder)


def test_a_release_without_parts_is_what_it_was() -> None:
    """No object is deleted and made again: names and selectors are the same, whatever else an upgrade changes."""
    objects = [each for each in render() if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    found: dict[str, list[str]] = {}
    for each in objects:
        if not each["kind"].startswith("ValidatingAdmission"):
            found.setdefault(each["kind"], []).append(each["metadata"]["name"])
    expected = [line.partition(": ") for line in OBJECTS_OF_ONE_RELEASE.strip().replace("\n ", "").splitlines()]
    assert {kind: sorted(names) for kind, names in found.items()} == {
        kind: sorted(names.split()) for kind, _, names in expected
    }
    for deployment in of_kind(tuple(objects), "Deployment"):
        component = deployment["spec"]["selector"]["matchLabels"].pop("app.kubernetes.io/component")
        assert deployment["metadata"]["name"] == f"baton-{component}"
        labels = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": "baton"}
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = component
        own = {name for name in deployment["spec"]["template"]["metadata"]["labels"] if name.startswith("baton.dev/")}
        assert own <= {"baton.dev/pool"}, "another label would restart every pod"


def test_each_part_has_its_own_pods() -> None:
    assert {pod.component for pod in pods(render(DOOR))} == OF_DOOR
    for values in (QWEN, LLAMA):
        assert {pod.component for pod in pods(render(values))} == OF_MODEL


def test_two_parts_are_the_whole() -> None:
    """Neither loses an object, and none is new."""
    model = Values(sets=("parts.door=false", "door.release=another"))
    door, alone, whole = (
        {(each["kind"], each["metadata"]["name"]) for each in render(values)}
        for values in (Values(sets=("parts.model=false",)), model, Values())
    )
    assert door | alone == whole


def test_objects_of_releases_have_names_of_their_own() -> None:
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in everything()]
    assert len(set(names)) == len(names)


def test_kubernetes_takes_every_object() -> None:
    wrong = [
        (each["kind"], each["metadata"]["name"], error)
        for values in (DOOR, *MODELS.values())
        for each in render(values)
        for error in schemas.errors(each, "1.33")
    ]
    assert not wrong


@pytest.mark.parametrize("namespace", [NAMESPACE, TEAM])
def test_what_pods_refer_to_is_in_their_namespace(namespace: str) -> None:
    objects = inside(namespace)

    def names(kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in of_kind(objects, kind)}

    def has(secret: str, keys: set[str]) -> bool:
        return secret in names("Secret") and keys <= set(the(objects, "Secret", secret)["data"])

    for pod in pods(objects):
        for volume in pod.spec.get("volumes", []):
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names("ConfigMap")
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"].get("items", [])}
                assert has(volume["secret"]["secretName"], keys), volume
        for container in pod.containers:
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert has(reference["name"], {reference["key"]}), variable
        assert pod.spec["serviceAccountName"] in names("ServiceAccount")
    for job in jobs(objects):
        assert job.spec["serviceAccountName"] in names("ServiceAccount")


def test_hosts_that_are_named_are_services_with_that_port() -> None:
    services = {
        (service["metadata"]["name"], service["metadata"]["namespace"], port["port"])
        for service in of_kind(everything(), "Service")
        for port in service["spec"]["ports"]
    }
    hosts = re.findall(r"([\w-]+)\.(\w+)\.svc:(\d+)", json.dumps(everything()))
    assert {(name, namespace, int(port)) for name, namespace, port in hosts} <= services
    assert {("baton-redis", NAMESPACE, "6379"), ("baton", NAMESPACE, "50051")} <= set(hosts)


def test_the_role_of_each_controller_is_for_its_own_pools() -> None:
    for name, values in MODELS.items():
        role = the(render(values), "Role", f"{name}-baton-controller")
        named = {
            each
            for rule in role["rules"]
            if rule["resources"] == ["servingpools"]
            for each in rule.get("resourceNames", ())
        }
        assert named == {f"{name}-baton-prefill", f"{name}-baton-decode"}


def test_a_pool_says_which_model_it_serves() -> None:
    for values, model in ((QWEN, "qwen"), (LLAMA, "llama"), (Values(), "smollm2-135m-instruct")):
        assert {pool["spec"]["model"] for pool in of_kind(render(values), "ServingPool")} == {model}


def test_routers_without_a_model_of_their_own_fetch_none(tmp_path: Path) -> None:
    objects = render(DOOR)
    pod = pod_of(objects, "router")
    assert "model" not in [each["name"] for each in pod.containers]
    (cache,) = (volume for volume in pod.spec["volumes"] if volume["name"] == "model-cache")
    assert cache == {"name": "model-cache", "emptyDir": {}}
    config = config_of(DOOR, pod, "router", tmp_path)
    assert not config.router.own_model
    assert config.cluster.endpoint == "baton"
    stored = render(Values(sets=(*DOOR.sets, "modelCache.type=persistentVolumeClaim")))
    assert not of_kind(stored, "PersistentVolumeClaim")
    assert pod_of(stored, "router").spec["volumes"] == pod.spec["volumes"]


def test_routers_may_do_without_the_model_of_their_release() -> None:
    pod = pod_of(render(Values(sets=("config.router.own_model=false",))), "router")
    assert "model" not in [each["name"] for each in pod.containers]
    assert "model" in [each["name"] for each in pod_of(render(), "router").containers]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_joins_the_routers_endpoint(name: str, tmp_path: Path) -> None:
    values = MODELS[name]
    objects = render(values)
    passwords = the(inside(NAMESPACE), "Secret", "baton-redis")["data"]
    router = config_of(DOOR, pod_of(render(DOOR), "router"), "router", tmp_path)
    for component, container in (("controller", "controller"), ("decode", "worker")):
        config = config_of(values, pod_of(objects, component), container, tmp_path)
        assert config.cluster.endpoint == router.cluster.endpoint
        assert config.release == name
        assert config.kubernetes.namespace == values.namespace
        url = urlsplit(config.index.redis_url)
        assert (url.hostname, url.port) == (f"baton-redis.{NAMESPACE}.svc", 6379)
        user = "worker" if container == "worker" else container
        variables = environment(
            inside(values.namespace), next(c for c in pod_of(objects, component).containers if c["name"] == container)
        )
        assert variables["BATON_INDEX_REDIS_URL"].startswith(f"redis://{user}:")
        assert url.username == user
        assert url.password == _text(passwords[user])


def _text(value: str) -> str:
    import base64

    return base64.b64decode(value).decode()


def test_both_may_have_another_name_of_the_endpoint_and_the_release(tmp_path: Path) -> None:
    more = ("config.cluster.endpoint=all", "config.model.release=v2")
    objects = render(Values(name="qwen", sets=(*QWEN.sets, *more)))
    config = loaded(objects, pod_of(objects, "controller").containers[-1], tmp_path)
    assert (config.cluster.endpoint, config.release) == ("all", "v2")


def test_routers_of_another_full_name_are_found_by_it() -> None:
    objects = render(Values(name="qwen", sets=(*JOINED, "door.fullname=front")))
    text = json.dumps(pod_of(objects, "decode").template)
    assert f"@front-redis.{NAMESPACE}.svc:6379" in text
    assert '"front-cluster"' in text
    (renamed,) = of_kind(render(Values(sets=("fullnameOverride=front", "parts.model=false"))), "Deployment")[:1]
    assert renamed["metadata"]["name"].startswith("front-")


def test_an_external_redis_is_everybody_s() -> None:
    external = ("redis.enabled=false", "redis.external.existingSecret=url")
    sets = tuple(item for item in LLAMA.sets if not item.startswith("redis."))
    objects = render(LLAMA._replace(sets=(*sets, *external)))
    variables = {each["name"]: each for each in pod_of(objects, "decode").serving[-1]["env"]}
    assert variables["BATON_INDEX_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {"name": "url", "key": "url"}
    assert f"baton-redis.{NAMESPACE}" not in json.dumps(objects)


def test_a_changed_share_restarts_the_controller_alone() -> None:
    """It announces the share; the workers go on."""
    before = render(QWEN)
    for change, restarted in (
        ("config.model.share=1", {"controller"}),
        ("config.model.release=v2", {"controller"}),
        ("config.router.mode=aggregated", {"controller"}),
        ("config.cluster.endpoint=all", {"controller"}),
        ("config.model.revision=r2", {"controller", "prefill", "decode"}),
    ):
        after = render(QWEN._replace(sets=(*QWEN.sets, change)))
        names = [pod.component for pod in pods(before) if pod.owner.startswith("Deployment")]
        changed = {name for name in names if pod_of(before, name).template != pod_of(after, name).template}
        assert changed == restarted, change


# -- who reaches whom --------------------------------------------------------------------------------------------------


def places(values: Values, *components: str) -> list[Place]:
    return [place_of(pod, values.namespace) for pod in pods(render(values)) if pod.component in components]


def all_reach(sources: list[Place], targets: list[Place], port: int) -> bool:
    answers = {reaches(everything(), source, target, port) for source in sources for target in targets}
    assert len(answers) == 1
    return answers.pop()


@pytest.mark.parametrize("name", MODELS)
def test_routers_and_models_reach_what_they_need(name: str) -> None:
    model, worker = MODELS[name], ("prefill", "decode")
    router, redis, test = (places(DOOR, component) for component in ("router", "redis", "test"))
    found = {
        "router to workers": all_reach(router, places(model, *worker), 45_000),
        "router to controller": all_reach(router, places(model, "controller"), 50_052),
        "workers to Redis": all_reach(places(model, *worker), redis, 6379),
        "controller to Redis": all_reach(places(model, "controller"), redis, 6379),
        "doctor to workers": all_reach(test, places(model, *worker), 45_000),
        "doctor to controller": all_reach(test, places(model, "controller"), 50_052),
        "helm test of the model": all_reach(places(model, "test"), router, 50_051),
    }
    assert not [what for what, is_reached in found.items() if not is_reached]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_else_is_open_between_releases(name: str) -> None:
    model = MODELS[name]
    router, redis = places(DOOR, "router"), places(DOOR, "redis")
    rest = {
        "router to Ray": all_reach(router, places(model, "prefill", "decode"), 6380),
        "router to head": all_reach(router, places(model, "head"), 6379),
        "router to Ray's store": all_reach(router, places(model, "ray-store"), 6379),
        "head to Redis": all_reach(places(model, "head"), redis, 6379),
        "helm test of the model to Redis": all_reach(places(model, "test"), redis, 6379),
        "workers to router": all_reach(places(model, "decode"), router, 50_051),
        "Redis to workers": all_reach(redis, places(model, "decode"), 45_000),
        "stranger to Redis": all_reach([STRANGER], redis, 6379),
        "stranger to workers": all_reach([STRANGER], places(model, "decode"), 45_000),
    }
    assert not [what for what, is_reached in rest.items() if is_reached]


@pytest.mark.parametrize(("one", "other"), [("qwen", "llama"), ("qwen", "phi"), ("llama", "qwen")])
def test_models_do_not_reach_each_other(one: str, other: str) -> None:
    for port in (45_000, 50_052, 6380, 6379):
        for components in (("prefill", "decode"), ("controller",), ("head",), ("ray-store",)):
            assert not all_reach(places(MODELS[one], "decode", "prefill"), places(MODELS[other], *components), port)


def test_a_namespace_that_is_not_listed_is_a_stranger_s() -> None:
    closed = render(Values(sets=("parts.model=false",)))
    objects = (*closed, *render(LLAMA))
    (router,), (redis,) = places(DOOR, "router"), places(DOOR, "redis")
    for worker in places(LLAMA, "prefill", "decode"):
        assert not reaches(objects, worker, redis, 6379)
        assert not reaches(objects, router, worker, 45_000)


def test_pods_that_only_look_like_a_model_s_are_not_admitted() -> None:
    """Labels of another endpoint, or a model of this name in another namespace."""
    (redis,) = places(DOOR, "redis")
    for worker in places(QWEN, "decode"):
        assert worker.labels
        for change in ({"baton.dev/door": "other"}, {"baton.dev/door-namespace": TEAM}):
            other = worker._replace(labels={**worker.labels, **change})
            assert not reaches(everything(), other, redis, 6379)
        assert not reaches(everything(), worker._replace(namespace=labels_of("shop")), redis, 6379)


# -- refusals ----------------------------------------------------------------------------------------------------------

AWAY = (*JOINED, "door.namespace=front")
REFUSED: dict[str, tuple[Values, str]] = {
    "nothing": (Values(sets=("parts.door=false", "parts.model=false")), "parts.door and parts.model are both false"),
    "no routers": (Values(sets=("parts.door=false",)), "set door.release to the Helm release with the routers"),
    "two kinds of routers": (Values(sets=("door.release=front",)), "set parts.door=false"),
    "itself": (Values(sets=JOINED), 'door.release is "baton", which is this release'),
    "one name": (Values(name="qwen", sets=(*JOINED, "fullnameOverride=baton")), "use another release name"),
    "a name of the routers'": (Values(name="baton-router", sets=JOINED), "some would have the same name"),
    "a name of the model's": (
        Values(name="baton", sets=("parts.door=false", "door.release=baton-head")),
        "some would have the same name",
    ),
    "keys of another namespace": (
        Values(name="qwen", sets=(*AWAY, "redis.passwords.existingSecret=a")),
        "copy Secret baton-cluster, and set clusterSecret.existingSecret",
    ),
    "passwords of another namespace": (
        Values(name="qwen", sets=(*AWAY, "clusterSecret.existingSecret=a")),
        "copy Secret baton-redis, and set redis.passwords.existingSecret",
    ),
    "a model of routers without one": (
        Values(sets=("parts.model=false", "config.router.own_model=true")),
        "config.router.own_model is true, but parts.model is false",
    ),
    "a label of the chart's": (
        Values(name="qwen", sets=(*JOINED, r"commonLabels.baton\.dev/door=other")),
        "commonLabels has baton.dev/door, which the chart sets itself",
    ),
}


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("values", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused(major: int, values: Values, sentence: str) -> None:
    done = template(major, values)
    assert done.returncode
    assert sentence in done.stderr


def test_routers_need_no_model_in_their_values() -> None:
    done = template(4, Values(sets=("parts.model=false", "config.model.id=", "pools.decode.minReplicas=9")))
    assert done.returncode == 0, done.stderr


# -- the documentation -------------------------------------------------------------------------------------------------

PAGE = CHART.parents[1] / "docs" / "kubernetes.md"


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for each, block in found if each == language]


def test_the_commands_of_the_documentation_render(tmp_path: Path) -> None:
    """With the values that the page shows, and for Secrets of the names that it copies."""
    text = PAGE.read_text().partition("## Several models behind one endpoint")[2]
    for file in blocks(text, "yaml"):
        (tmp_path / file.partition("\n")[0].removeprefix("# ")).write_text(file)
    commands = [
        shlex.split(line)
        for block in blocks(text, "")
        for line in block.replace("\\\n", "").splitlines()
        if line.startswith("helm ")
    ]
    found = []
    for _, verb, name, _, *options in commands:
        assert verb in ("install", "upgrade")
        words = [str(tmp_path / word) if word.endswith(".yaml") else word for word in options]
        done = helm(4, "template", name, str(CHART), *words)
        assert done.returncode == 0, done.stderr
        found.append((name, documents(done.stdout)))
    assert [name for name, _ in found] == ["baton", "qwen", "llama", "qwen", "qwen-next", "baton", "baton"]
    shares = [re.findall(r"share: (\d+)", json.dumps(of_kind(objects, "ConfigMap"))) for _, objects in found]
    assert shares[3:5] == [["9"], ["1"]]
    copied = dict(re.findall(r"create secret generic (\S+) --from-literal=(\S+?)=", text.replace("\\\n", "")))
    named = {
        values["secret"]["secretName"]
        for pod in pods(found[2][1])
        for values in pod.spec["volumes"]
        if "secret" in values
    }
    assert {"baton-cluster"} <= named & set(copied)
    assert '"baton-redis"' in json.dumps(pod_of(found[2][1], "decode").template)
