"""Both majors of helm lint the chart and make the same of it; Kubernetes and the operators would take all of it."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.helm import schemas
from tests.helm.chart import (
    CHART,
    MAJORS,
    MATRIX,
    Object,
    Values,
    every_values,
    helm,
    of_kind,
    pods,
    render,
    template,
    the,
)

OLDEST = "1.27"
"""It has no sidecars, so it gets other objects."""
VERSIONS = ("1.31", "1.34", "1.35", "1.37")
SIDECARS = ("1.29", "1.31", "1.34", "1.35", "1.37")
"""KubeRay's head pod needs them."""
VALUES_FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("file", ["values.yaml", *VALUES_FILES])
def test_lint_finds_nothing(major: int, file: str) -> None:
    done = helm(major, "lint", "--strict", str(CHART), "--values", str(CHART / file))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_every_values_file_is_in_the_matrix() -> None:
    assert {f"values-{values.file}.yaml" for values in MATRIX.values() if values.file} == set(VALUES_FILES)


@every_values
@pytest.mark.chaos
def test_both_majors_make_the_same(values: Values) -> None:
    assert _without_drawn_secrets(render(values, 3)) == _without_drawn_secrets(render(values, 4))


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("name", ["defaults", "everything-kuberay", "monitoring", "tls"])
def test_two_renderings_are_equal(major: int, name: str) -> None:
    """Else Argo CD, which renders again at every sync, would change what runs."""
    one, other = (template(major, MATRIX[name]) for _ in range(2))
    assert one.returncode == 0, one.stderr
    assert one.stdout == other.stdout


def test_no_template_draws_lots_or_looks_secrets_up() -> None:
    """A RayCluster's live sizes are the one thing that is looked up: helm would set them back."""
    drawing = re.compile(r"\b(rand[A-Z]\w+|gen[A-Z]\w+|uuidv4|now|htpasswd)\b")
    code = {
        path.name: re.sub(r"/\*.*?\*/|\"[^\"\n]*\"", "", path.read_text(), flags=re.DOTALL)
        for path in (CHART / "templates").rglob("*.*")
    }
    actions = {name: " ".join(re.findall(r"\{\{(.*?)\}\}", text, re.DOTALL)) for name, text in code.items()}
    assert not [name for name, text in actions.items() if drawing.search(text)]
    assert [name for name, text in actions.items() if "lookup " in text] == ["raycluster.yaml"]


def _without_drawn_secrets(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects), "two objects of one name"
    return {key: {**each, "data": sorted(each["data"])} if key[0] == "Secret" else each for key, each in found.items()}


@every_values
def test_kubernetes_takes_every_object(values: Values) -> None:
    objects = render(values)
    wrong = [
        (version, each["kind"], each["metadata"]["name"], error)
        for version in VERSIONS
        for each in objects
        for error in schemas.errors(each, version)
    ]
    wrong += [
        (version, "pod", pod.owner, error)
        for version in SIDECARS
        for pod in pods(objects)
        if pod.in_raycluster
        for error in schemas.template_errors(pod.template, version)
    ]
    assert not wrong


@pytest.mark.parametrize("name", ["cpu-deployments", "gpus", "monitoring"])
def test_the_oldest_kubernetes_takes_every_object(name: str) -> None:
    for each in render(MATRIX[name]._replace(kube=f"{OLDEST}.0")):
        assert not list(schemas.errors(each, OLDEST)), each["metadata"]["name"]


def test_the_schemas_refuse_what_is_wrong() -> None:
    """Of each kind of check one: the tests above would be worth nothing without."""
    objects = render(MATRIX["gpu-cluster-kuberay"])
    deployment, pool = the(objects, "Deployment", "baton-router"), the(objects, "ServingPool", "baton-decode")
    cluster = the(objects, "RayCluster", "baton")
    assert schemas.errors({**deployment, "spec": {**deployment["spec"], "replicas": "2"}}, "1.35")
    assert schemas.errors({**pool, "spec": {**pool["spec"], "sise": 2}}, "1.35")
    assert schemas.errors({**cluster, "spec": {**cluster["spec"], "workers": []}}, "1.35")
    template = cluster["spec"]["headGroupSpec"]["template"]
    assert schemas.template_errors({**template, "spec": {**template["spec"], "container": []}}, "1.35")


def test_everything_lies_in_the_release_namespace() -> None:
    assert {each["metadata"]["namespace"] for each in render(MATRIX["everything-kuberay"])} == {"serving"}


def test_the_definition_of_serving_pools_is_one_that_kubernetes_takes() -> None:
    crd = yaml.safe_load(schemas.CRD.read_text())
    assert not schemas.errors(crd, "1.35")
    (version,) = crd["spec"]["versions"]
    scale = version["subresources"]["scale"]
    root = version["schema"]["openAPIV3Schema"]["properties"]
    for path in (*scale.values(), *(column["jsonPath"] for column in version["additionalPrinterColumns"])):
        _, section, field = path.split(".")
        assert section == "metadata" or field in root[section]["properties"], path


def test_every_field_of_serving_pools_that_the_controller_writes_is_defined() -> None:
    from deploy.kubernetes.serving_pool import PoolReport, PoolSpec, status_of

    status = status_of(
        PoolSpec(size=2, asked=9, max_size=2, selector="a=b", generation=3),
        PoolReport(desired=2, num_workers=1, num_ready=1, num_draining=0),
        {},
    )
    pool = {**the(render(), "ServingPool", "baton-decode"), "status": status}
    assert not schemas.errors(pool, "1.35")


def test_only_what_is_asked_for_needs_an_operator() -> None:
    ours = {"baton.dev/v1alpha1"}
    groups = {each["apiVersion"] for each in render() if "." in each["apiVersion"].partition("/")[0]} - ours
    assert groups == {"rbac.authorization.k8s.io/v1", "networking.k8s.io/v1", "admissionregistration.k8s.io/v1"}
    assert of_kind(render(MATRIX["kuberay"]), "RayCluster")
