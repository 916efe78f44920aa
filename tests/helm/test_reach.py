"""The compartments: every pair of components and every port, against the table of the chart's README."""

from __future__ import annotations

import pytest

from tests.helm.chart import CHART, MATRIX, Object, Values, cases, of_kind, pods, render
from tests.helm.reach import Place, is_admitted, is_let_out, place_of, reaches

RAY = (6380, 6381, 6382, 6383, 6384, 6385, 10_002, 19_999)
WORKER = (32_768, 45_000, 60_999)
"""Some of the ports that the kernel gives a worker."""
STRANGER = Place(labels={"app": "shop"}, namespace={"name": "shop"})
OUTSIDE = Place("203.0.113.9")
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "router 50051, 8000": ("router", (50_051, 8000)),
    "router 9464": ("router", (9464,)),
    "controller 50052": ("controller", (50_052,)),
    "controller, Ray": ("controller", RAY),
    "head 6379, Ray": ("head", (6379, 10_001, *RAY)),
    "worker": ("worker", WORKER),
    "worker, Ray": ("worker", RAY),
    "redis 6379": ("redis", (6379,)),
    "ray-store 6379": ("ray-store", (6379,)),
    "names 53": ("", (53,)),
    "443 anywhere": ("", (443,)),
    "Kubernetes 6443": ("", (6443,)),
}
"""Columns of the table: the component (empty: outside), and its ports."""
NOBODY_S = (1, 22, 80, 6378, 8265, 20_000, 32_767, 61_000)
"""Ports of a pod that are for Ray nodes and workers among each other, if for anybody."""
MESH = {"head", "controller", "worker"}
WITHOUT_DOWNLOADS = "networkPolicy.modelDownloads=false"


def table() -> dict[str, dict[str, bool]]:
    """Row -> column -> whether it is reached, as the README says."""
    lines = (CHART / "README.md").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("| from, to "))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:]]
    found = {}
    for row in cells[2 : next(at for at, row in enumerate(cells) if row == [""])]:
        assert set(row[1:]) <= {"yes", "-"}
        found[row[0]] = {column: cell == "yes" for column, cell in zip(cells[0][1:], row[1:], strict=True)}
    return found


def places(objects: tuple[Object, ...], component: str) -> list[Place]:
    """The places of a row or a column; both pools are the table's `worker`."""
    if component == "stranger":
        return [STRANGER]
    if not component:
        return [OUTSIDE]
    names = {"worker", "prefill", "decode"} if component == "worker" else {component}
    return [place_of(pod) for pod in pods(objects) if pod.component in names]


def seen(objects: tuple[Object, ...], source: str, column: str) -> bool:
    target, ports = COLUMNS[column]
    protocol = "UDP" if column.startswith("names") else "TCP"
    answers = {
        reaches(objects, one, other, port, protocol)
        for one in places(objects, source)
        for other in places(objects, target)
        for port in ports
    }
    assert len(answers) == 1, f"from {source} to {column}: some and not others"
    return answers.pop()


def test_the_table_names_every_component_and_every_port() -> None:
    objects = render()
    named = {"worker" if pod.component in ("prefill", "decode") else pod.component for pod in pods(objects)}
    assert set(table()) == named | {"stranger"}
    assert {tuple(row) for row in table().values()} == {tuple(COLUMNS)}
    for pod in pods(objects):
        component = "worker" if pod.component in ("prefill", "decode") else pod.component
        for port in place_of(pod).ports.values():
            assert any(target == component and port in ports for target, ports in COLUMNS.values())


@pytest.mark.parametrize("source", ["router", "controller", "head", "worker", "redis", "ray-store", "test", "stranger"])
def test_the_table_is_what_the_policies_say(source: str) -> None:
    objects = render()
    columns = [column for column, (target, _) in COLUMNS.items() if target or source != "stranger"]
    assert {column: seen(objects, source, column) for column in columns} == {
        column: table()[source][column] for column in columns
    }


@pytest.mark.parametrize("source", ["router", "controller", "head", "worker", "redis", "ray-store", "test"])
def test_either_side_alone_keeps_what_the_table_keeps(source: str) -> None:
    """An endpoint is shut from both sides, so that one policy too few opens none. To the routers all may come in."""
    objects = render()
    for column, (target, ports) in COLUMNS.items():
        sides = [is_let_out, is_admitted] if target != "router" else [is_let_out]
        for one in places(objects, source) if target else ():
            for other in places(objects, target):
                found = {lets(objects, one, other, port) for lets in sides for port in ports}
                assert found == {table()[source][column]}, f"from {source} to {column}"


VARIANTS = [name for name, values in MATRIX.items() if "networkPolicy" not in str(values.sets)]


@pytest.mark.parametrize("values", cases(VARIANTS))
def test_no_values_open_an_endpoint_between_components(values: Values) -> None:
    """Whatever else is switched on; what is not there cannot be reached."""
    objects = render(values)
    components = {"worker" if pod.component in ("prefill", "decode") else pod.component for pod in pods(objects)}
    inside = [column for column, (target, _) in COLUMNS.items() if target in components]
    assert len(inside) >= 6
    if of_kind(objects, "ServiceMonitor") or of_kind(objects, "PodMonitor"):
        inside.remove("router 9464")  # any pod may be Prometheus
    for source in components | {"stranger"}:
        for column in inside:
            assert seen(objects, source, column) == table()[source][column], f"from {source} to {column}"


def test_every_other_port_is_for_ray_nodes_and_workers_among_each_other() -> None:
    objects = render()
    for source in table():
        for target in {target for target, _ in COLUMNS.values()} - {""}:
            for port in NOBODY_S:
                found = {
                    reaches(objects, one, other, port)
                    for one in places(objects, source)
                    for other in places(objects, target)
                }
                alone = {source, target} in ({"head"}, {"controller"})  # there is one of them
                assert found == {{source, target} <= MESH and not alone}, f"from {source} to {target}:{port}"


def test_workers_speak_by_every_protocol_and_routers_by_tcp_alone() -> None:
    objects = render()
    (worker, other), (router,) = places(objects, "worker"), places(objects, "router")
    assert reaches(objects, worker, other, 4791, "UDP"), "RDMA over Ethernet"
    assert not reaches(objects, router, worker, 45_000, "UDP")


def test_clients_and_monitoring_are_admitted_where_they_are_listed() -> None:
    objects = render(MATRIX["policies"])
    router, test = places(objects, "router")[0], places(objects, "test")[0]
    client = Place(labels={"app": "page"}, namespace={"team": "a"})
    prometheus = Place(labels={"app": "prometheus"}, namespace={"name": "monitoring"})
    endpoints = {
        name: [reaches(objects, place, router, port) for port in (50_051, 8000, 9464)]
        for name, place in (("client", client), ("prometheus", prometheus), ("stranger", STRANGER), ("test", test))
    }
    assert endpoints == {
        "client": [True, True, False],
        "prometheus": [False, False, True],
        "stranger": [False, False, False],
        "test": [True, True, True],
    }
    watched = render(MATRIX["monitoring"])
    router = places(watched, "router")[0]
    assert reaches(watched, prometheus, router, 9464), "none is listed, and a monitor is on"
    assert not reaches(watched, OUTSIDE, router, 9464)


def test_the_way_out_is_for_what_is_configured() -> None:
    """Traces, models, and a Redis of one's own; the controller alone asks Kubernetes, under KubeRay the head, too."""
    traced = render(MATRIX["policies"])
    foreign = render(MATRIX["external-redis"])
    alone = render(Values(sets=(WITHOUT_DOWNLOADS,)))
    kuberay = render(Values(sets=(WITHOUT_DOWNLOADS, "orchestrator=kuberay")))

    def leave(objects: tuple[Object, ...], port: int) -> set[str]:
        return {pod.component for pod in pods(objects) if reaches(objects, place_of(pod), OUTSIDE, port)}

    ours = {"router", "controller", "prefill", "decode"}
    assert leave(traced, 4317) == ours
    assert leave(alone, 4317) == set()
    assert leave(foreign, 6380) == {*ours, "test"}
    assert leave(alone, 6379) == set()
    assert (leave(alone, 443), leave(alone, 6443)) == ({"controller"}, {"controller"})
    assert (leave(kuberay, 443), leave(kuberay, 6443)) == ({"controller", "head"}, {"controller", "head"})


def test_further_rules_are_for_every_pod_and_a_network_without_ranges_may_have_all_ports() -> None:
    more = ("networkPolicy.extraEgress[0].ports[0].port=9", "networkPolicy.extraIngress[0].ports[0].port=9")
    wide = ("networkPolicy.workerPorts.first=1", "networkPolicy.workerPorts.last=65535")
    objects = render(Values(sets=(*more, *wide)))
    for pod in pods(objects):
        assert reaches(objects, place_of(pod), OUTSIDE, 9)
        assert reaches(objects, STRANGER, place_of(pod), 9)
    assert seen(objects, "router", "worker, Ray")
    assert not seen(objects, "router", "head 6379, Ray")
