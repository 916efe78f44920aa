"""The parts of the test API server, without a server."""

from __future__ import annotations

import json
import queue
from typing import Any

import pytest
import yaml

from tests.fakekube import cel, discovery, patch, protobuf, rbac, rules, selectors
from tests.fakekube.api import Api
from tests.fakekube.fields import at, put
from tests.fakekube.garbage import delete, garbage_collector
from tests.fakekube.kinds import BUILTIN, CRDS, NAMESPACES, PODS, Kinds, of_crd
from tests.fakekube.messages import Request, Response
from tests.fakekube.ownership import Conflicts, Manager, applied, owners_of, updated
from tests.fakekube.schema import Schema, builtin, of_custom
from tests.fakekube.store import CLOSED, Event, Gone, Key, Missing, Object, Resource, Stale, Store
from tests.fakekube.table import age

CONFIG_MAPS = Resource("", "configmaps")
A = Key(CONFIG_MAPS, "default", "a")


def test_generation_rises_with_what_is_neither_metadata_nor_status() -> None:
    store = Store()
    store.create(A, {"spec": {"n": 1}})
    store.modify(A, lambda value: value["metadata"].update(labels={"x": "y"}))
    store.modify(A, lambda value: value.update(status={"n": 1}))
    assert store.get(A)["metadata"]["generation"] == 1
    store.modify(A, lambda value: value["spec"].update(n=2))
    assert store.get(A)["metadata"]["generation"] == 2


def test_an_update_that_changes_nothing_makes_no_version() -> None:
    store = Store()
    created = store.create(A, {"data": {"n": "1"}})
    assert store.update(A, {"data": {"n": "1"}, "metadata": {}}) == created
    assert store.version == created["metadata"]["resourceVersion"]
    changed = store.update(A, {"data": {"n": "2"}, "metadata": {}})
    with pytest.raises(Stale):
        store.update(A, created)
    assert store.get(A) == changed


def test_a_watch_that_begins_at_a_version_gets_what_came_after() -> None:
    store = Store()
    version = store.create(A, {"n": 1})["metadata"]["resourceVersion"]
    store.modify(A, lambda value: value.update(n=2))
    store.create(Key(PODS, "default", "p"), {})
    store.delete(A)
    with store.changes(lambda key: key == A, since=version) as changes:
        store.create(A, {"n": 3})
        store.close_watches()
        events = list(iter(changes.get, CLOSED))
    assert [(event.type, event.previous.get("n"), event.object["n"]) for event in events] == [
        ("MODIFIED", 1, 2),
        ("DELETED", 2, 2),
        ("ADDED", None, 3),
    ]


def test_a_version_that_is_too_old_is_gone() -> None:
    store = Store(history=3)
    store.create(A, {"n": 0})
    for number in range(1, 4):
        store.modify(A, lambda value: value.update(n=number))  # noqa: B023
    with pytest.raises(Gone), store.changes(since="0"):
        pass
    with store.changes(since="1") as changes:
        assert [changes.get().object["n"] for _ in range(changes.qsize())] == [1, 2, 3]


def test_a_scratch_store_leaves_its_store_alone() -> None:
    store = Store()
    store.create(A, {"n": 1})
    store.create(Key(CONFIG_MAPS, "default", "b"), {})
    scratch = store.scratch(A)
    assert scratch.keys() == [A]
    changed = scratch.modify(A, lambda value: value.update(n=2))
    assert store.get(A)["n"] == 1
    assert int(changed["metadata"]["resourceVersion"]) > int(store.version)


def test_an_object_whose_owner_is_gone_does_not_stay() -> None:
    """A controller may make one just after its owner went."""
    store = Store()
    with garbage_collector(store):
        try:
            with store.changes() as changes:
                store.create(A, {"metadata": {"ownerReferences": [{"name": "x", "uid": "nobody"}]}})
                _until(changes, "DELETED", A)
        finally:
            store.close_watches()


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_only_foreground_deletion_waits_for_dependents(propagation: str) -> None:
    store = Store()
    owner, child = A, Key(CONFIG_MAPS, "default", "child")
    reference = {"name": "a", "uid": store.create(owner, {})["metadata"]["uid"]}
    store.create(child, {"metadata": {"ownerReferences": [reference], "finalizers": ["example.dev/wait"]}})
    with garbage_collector(store):
        try:
            with store.changes() as changes:
                delete(store, owner, propagation)
                assert (owner in store.versions(CONFIG_MAPS)) == (propagation == "Foreground")
                _until(changes, "MODIFIED", child)  # it has been deleted, and waits
                assert (owner in store.versions(CONFIG_MAPS)) == (propagation == "Foreground")
                store.modify(child, lambda value: value["metadata"].update(finalizers=[]))
                if propagation == "Foreground":
                    _until(changes, "DELETED", owner)
            assert store.versions(CONFIG_MAPS) == {}
        finally:
            store.close_watches()


@pytest.mark.parametrize(
    ("selector", "matching"),
    [
        ("", "abc"),
        ("app=web", "a"),
        ("app==web,tier!=x", "a"),
        ("app!=web", "bc"),
        ("app in (web, db)", "ab"),
        ("app notin (web)", "bc"),
        ("app", "ab"),
        ("!app", "c"),
        ("app in (web,db),tier", "b"),
    ],
)
def test_label_selectors(selector: str, matching: str) -> None:
    labels = {"a": {"app": "web"}, "b": {"app": "db", "tier": "x"}, "c": {}}
    assert "".join(name for name in labels if selectors.labels_match(selector, labels[name])) == matching


def test_field_selectors_and_label_selectors_of_objects() -> None:
    pod = {"metadata": {"name": "a"}, "status": {"phase": "Running"}}
    assert selectors.fields_match("metadata.name=a,status.phase!=Failed", pod)
    assert selectors.fields_match("spec.nodeName=", pod)
    assert not selectors.fields_match("status.phase=Failed", pod)
    with pytest.raises(ValueError, match="invalid field selector"):
        selectors.fields_match("status.phase", pod)
    selector = {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "NotIn", "values": ["d"]}]}
    text = selectors.selector_text(selector)
    assert text == "a=b,c notin (d)"
    for labels in ({"a": "b"}, {"a": "b", "c": "d"}, {"c": "e"}):
        assert selectors.selector_matches(selector, labels) == selectors.labels_match(text, labels)


def test_paths() -> None:
    value = {"status": {"conditions": [{"type": "A", "n": 1}, {"type": "Ready", "n": 2}]}, "metadata": {"a.b/c": "d"}}
    assert at(value, '.status.conditions[?(@.type=="Ready")].n') == 2
    assert at(value, ".status.conditions[1].type") == "Ready"
    assert at(value, r".metadata.a\.b/c") == "d"
    assert at(value, ".status.none.of.these") is None
    with pytest.raises(ValueError, match="no such JSONPath"):
        at(value, ".status..n")
    put(value, ".spec.deep.replicas", 3)
    assert at(value, ".spec.deep.replicas") == 3


DEPLOYMENT = builtin("Deployment", "apps/v1")


def _deployment(*containers: Object, **spec: Any) -> Object:
    return {"spec": {"template": {"spec": {"containers": list(containers)}}} | spec}


def test_strategic_merge_goes_by_the_keys_of_lists() -> None:
    live = _deployment(
        {"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]},
        {"name": "b", "ports": [{"containerPort": 80, "name": "old"}], "args": ["one"]},
        strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}},
    )
    wanted: Object = {
        "spec": {
            "strategy": {"$retainKeys": ["type"], "type": "Recreate"},
            "template": {
                "spec": {
                    "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}, {"name": "c"}],
                    "containers": [
                        {"name": "c", "image": "3"},
                        {"name": "a", "env": [{"name": "X", "$patch": "delete"}, {"name": "Z", "value": "3"}]},
                        {"name": "b", "ports": [{"containerPort": 80, "name": "new"}], "args": ["two"]},
                    ],
                }
            },
        },
        "metadata": {"$deleteFromPrimitiveList/finalizers": ["x"]},
    }
    live["metadata"] = {"finalizers": ["x", "y"]}
    patched = patch.strategic(live, wanted, DEPLOYMENT)
    assert patched["metadata"]["finalizers"] == ["y"]
    assert patched["spec"]["strategy"] == {"type": "Recreate"}
    assert patched["spec"]["template"]["spec"]["containers"] == [
        {"name": "b", "ports": [{"containerPort": 80, "name": "new"}], "args": ["two"]},
        {"name": "a", "image": "1", "env": [{"name": "Y", "value": "2"}, {"name": "Z", "value": "3"}]},
        {"name": "c", "image": "3"},
    ]


def test_strategic_merge_replaces_and_deletes_whole_parts() -> None:
    live = _deployment({"name": "a"}, {"name": "b"}, selector={"matchLabels": {"a": "b"}})
    wanted = _deployment({"$patch": "replace"}, {"name": "c"}, selector={"$patch": "replace", "matchLabels": {}})
    assert patch.strategic(live, wanted, DEPLOYMENT) == _deployment({"name": "c"}, selector={"matchLabels": {}})
    with pytest.raises(patch.BadPatch, match="merge key: name"):
        patch.strategic(live, _deployment({"image": "x"}), DEPLOYMENT)


def test_json_patch_and_merge_patch() -> None:
    value = {"a": [1, 2], "b/c": {"d": 1}}
    operations: list[Object] = [
        {"op": "test", "path": "/b~1c/d", "value": 1},
        {"op": "add", "path": "/a/1", "value": 9},
        {"op": "add", "path": "/a/-", "value": 3},
        {"op": "move", "from": "/b~1c/d", "path": "/e"},
        {"op": "remove", "path": "/a/0"},
        {"op": "replace", "path": "/b~1c", "value": None},
    ]
    assert patch.json_patch(value, operations) == {"a": [9, 2, 3], "b/c": None, "e": 1}
    assert value == {"a": [1, 2], "b/c": {"d": 1}}
    wrongs: list[Object] = [
        {"op": "test", "path": "/a/0", "value": 5},
        {"op": "remove", "path": "/x"},
        {"op": "no", "path": "/a"},
    ]
    for wrong in wrongs:
        with pytest.raises(patch.BadPatch):
            patch.json_patch(value, [wrong])
    merged = patch.merge({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": None, "e": {"f": None}}, "d": [2]})
    assert merged == {"a": {"c": 2, "e": {}}, "d": [2]}


ONE, TWO = (Manager(name, "Apply", "apps/v1") for name in ("one", "two"))
KUBECTL = Manager("kubectl", "Update", "apps/v1", "scale")


def _apply(live: Object, wanted: Object, manager: Manager, *, force: bool = False) -> Object:
    return applied(live, wanted, manager, DEPLOYMENT, force)


def test_an_update_takes_a_field_and_an_apply_has_to_ask() -> None:
    live = _apply({}, _deployment(replicas=2), ONE)
    scaled = updated(live, live | {"spec": live["spec"] | {"replicas": 7}}, KUBECTL, DEPLOYMENT)
    replicas = ("f:spec", "f:replicas")
    assert replicas in owners_of(scaled)[KUBECTL].paths
    assert replicas not in owners_of(scaled)[ONE].paths
    with pytest.raises(Conflicts) as failed:
        _apply(scaled, _deployment(replicas=2), ONE)
    assert failed.value.fields == {KUBECTL: [".spec.replicas"]}
    assert _apply(scaled, _deployment(), ONE)["spec"]["replicas"] == 7
    shared = _apply(scaled, _deployment(replicas=7), ONE)  # of the same opinion
    assert replicas in owners_of(shared)[KUBECTL].paths & owners_of(shared)[ONE].paths
    forced = _apply(scaled, _deployment(replicas=2), ONE, force=True)
    assert forced["spec"]["replicas"] == 2
    assert KUBECTL not in owners_of(forced)


def test_apply_removes_what_it_alone_wanted() -> None:
    both = _deployment({"name": "a", "image": "x"}, {"name": "b", "image": "x"}, replicas=1, paused=True)
    live = _apply({}, both, ONE)
    live = _apply(live, _deployment({"name": "b", "image": "x"}), TWO)
    live["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] = "Always"  # a default, nobody's
    left = _apply(live, _deployment(), ONE)
    assert left["spec"] == {"template": {"spec": {"containers": [{"name": "b", "image": "x"}]}}}
    live = _apply({}, _deployment({"name": "a", "image": "x", "tty": True}), ONE)
    changed = updated(live, live | _deployment({"name": "a", "image": "y", "tty": True}), KUBECTL, DEPLOYMENT)
    left = _apply(changed, _deployment(), ONE)  # the image is kubectl's now, and with it the container stays
    assert left["spec"]["template"]["spec"]["containers"] == [{"name": "a", "image": "y"}]


def test_apply_removes_a_part_with_the_defaults_in_it() -> None:
    live = _apply({}, _deployment({"name": "a", "livenessProbe": {"grpc": {"port": 1}, "periodSeconds": 5}}), ONE)
    (container,) = live["spec"]["template"]["spec"]["containers"]
    container["livenessProbe"]["grpc"]["service"] = ""
    container["livenessProbe"]["timeoutSeconds"] = 1
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 5}
    changed = _apply(live, _deployment({"name": "a", "livenessProbe": probe}), ONE)
    (container,) = changed["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"] == probe | {"timeoutSeconds": 1}
    (container,) = _apply(live, _deployment({"name": "a"}), ONE)["spec"]["template"]["spec"]["containers"]
    assert container == {"name": "a"}


def test_managed_fields_are_read_as_they_were_written() -> None:
    port = {"containerPort": 80, "protocol": "TCP"}
    live = _apply({}, _deployment({"name": "a", "ports": [port]}, selector={"matchLabels": {"a": "b"}}), ONE)
    (entry,) = live["metadata"]["managedFields"]
    containers = entry["fieldsV1"]["f:spec"]["f:template"]["f:spec"]["f:containers"]
    ports: Object = {'k:{"containerPort":80,"protocol":"TCP"}': {".": {}, "f:containerPort": {}, "f:protocol": {}}}
    assert containers == {'k:{"name":"a"}': {".": {}, "f:name": {}, "f:ports": ports}}
    assert entry["fieldsV1"]["f:spec"]["f:selector"] == {}  # it is replaced as a whole
    again = _apply(live, _deployment({"name": "a", "ports": [port]}, selector={"matchLabels": {"a": "b"}}), ONE)
    assert again == live


def test_a_port_without_protocol_is_the_one_with_the_default() -> None:
    live = _apply({}, _deployment({"name": "a", "ports": [{"containerPort": 80, "protocol": "TCP"}]}), ONE)
    merged = _apply(live, _deployment({"name": "a", "ports": [{"containerPort": 80, "name": "http"}]}), TWO)
    port = {"containerPort": 80, "protocol": "TCP", "name": "http"}
    assert merged["spec"]["template"]["spec"]["containers"][0]["ports"] == [port]


def _until(changes: queue.Queue[Event], kind: str, key: Key) -> None:
    while (event := changes.get(timeout=5)).type != kind or event.key != key:
        continue


CRD: Object = yaml.safe_load("""
metadata: {name: pools.example.dev}
spec:
  group: example.dev
  scope: Namespaced
  names: {plural: pools, kind: Pool}
  versions:
    - {name: v1beta1, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              default: {}
              properties:
                size: {type: integer, default: 1, exclusiveMinimum: true, minimum: 0}
                share: {x-kubernetes-int-or-string: true}
                none: {type: string, nullable: true}
                free: {type: object, x-kubernetes-preserve-unknown-fields: true}
                labels: {type: object, additionalProperties: {type: string}}
                many: {type: array, items: {type: object, properties: {n: {type: integer, format: int32}}}}
    - {name: v0, served: false, storage: false, schema: {openAPIV3Schema: {type: object}}}
""")


def _pool_schema() -> Schema:
    return of_custom(CRD["spec"]["versions"][1]["schema"]["openAPIV3Schema"])


def test_custom_resources_are_pruned_and_defaulted() -> None:
    schema = _pool_schema()
    value: Object = {"apiVersion": "x", "metadata": {"name": "a", "labels": {"b": "c"}, "lables": {}}, "state": 1}
    value["spec"] = {"free": {"any": 1}, "labels": {"k": "v"}, "many": [{"n": 1, "m": 2}], "sise": 4, "size": None}
    assert sorted(schema.prune(value)) == ["metadata.lables", "spec.many[0].m", "spec.sise", "state"]
    schema.fill(value)
    assert value["spec"] == {"free": {"any": 1}, "labels": {"k": "v"}, "many": [{"n": 1}], "size": 1}
    empty: Object = {}
    schema.fill(empty)
    assert empty["spec"] == {"size": 1}
    assert schema.errors(value) == []


def test_parts_without_a_type_keep_what_they_hold() -> None:
    properties = {"a": {"type": "object", "default": {"any": {"thing": 1}}}}
    versions = [
        {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"properties": properties}}}
    ]
    value = {"spec": {"versions": versions}, "metadata": {"managedFields": [{"fieldsV1": {"f:spec": {}}}], "x": 1}}
    before = json.loads(json.dumps(value["spec"]))
    assert builtin("CustomResourceDefinition", "apiextensions.k8s.io/v1").prune(value) == ["metadata.x"]
    assert value == {"spec": before, "metadata": {"managedFields": [{"fieldsV1": {"f:spec": {}}}]}}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"size": 0}, "$.spec.size"),
        ({"size": "1"}, "$.spec.size"),
        ({"size": True}, "$.spec.size"),
        ({"share": 1.5}, "$.spec.share"),
        ({"labels": {"a": 1}}, "$.spec.labels.a"),
        ({"many": [{"n": 2**31}]}, "$.spec.many[0].n"),
        ({"size": None}, "$.spec.size"),
    ],
)
def test_custom_resources_are_checked(spec: Object, path: str) -> None:
    schema = _pool_schema()
    assert schema.errors({"spec": {"size": 1, "share": "5%", "none": None, "many": [{"n": 2**31 - 1}]}}) == []
    assert [error.json_path for error in schema.errors({"spec": spec})] == [path]


def test_the_rules_of_a_crd() -> None:
    texts = {
        "!has(self.a) || self.a <= self.b": "a too large",
        "self.name.startsWith('x') && size(self.list) > 0": "name",
        "self.b == oldSelf.b": "b is fixed",
    }
    listed = [{"rule": text, "message": message} for text, message in texts.items()]
    schema = Schema({"properties": {"spec": {"x-kubernetes-validations": listed}}}, custom=True)

    def broken(spec: Object, old: Object | None = None) -> list[str]:
        return [said for _, said in cel.broken(schema, {"spec": spec}, {"spec": old} if old else None)]

    assert broken({"b": 1, "name": "x1", "list": [1]}) == []
    assert broken({"a": 2, "b": 1, "name": "y", "list": []}) == ["a too large", "name"]
    assert broken({"b": 1, "name": "x1", "list": [1]}, {"b": 2}) == ["b is fixed"]
    assert broken({"a": 2, "name": "x1", "list": [1]}) == ["rule evaluation error: no such key: b"]
    unknown = Schema({"x-kubernetes-validations": [{"rule": "self.all(x, x > 0)"}]}, custom=True)
    with pytest.raises(cel.Unknown):
        list(cel.broken(unknown, [1], None))


def test_kinds_of_a_crd() -> None:
    assert [kind.version for kind in of_crd(CRD)] == ["v1", "v1beta1"]
    store = Store()
    kinds = Kinds(store)
    assert kinds.find("example.dev", "v1", "pools") is None
    store.create(Key(CRDS, "", "pools.example.dev"), CRD)
    found = kinds.find("example.dev", "v1", "pools")
    assert found is not None
    assert (found.name, found.singular, found.list_name) == ("Pool", "pool", "PoolList")
    store.delete(Key(CRDS, "", "pools.example.dev"))
    assert kinds.find("example.dev", "v1", "pools") is None


def test_every_kind_has_its_schema() -> None:
    for kind in BUILTIN:
        assert kind.schema.node["properties"]["kind"]["enum"] == [kind.name]


def test_discovery_tells_the_same_in_both_forms() -> None:
    plain, _ = discovery.document(["apis", "apps", "v1"], BUILTIN, "application/json") or ({}, "")
    whole, kind = discovery.document(["apis"], BUILTIN, discovery.AGGREGATED) or ({}, "")
    assert kind == discovery.AGGREGATED
    (apps,) = (group for group in whole["items"] if group["metadata"]["name"] == "apps")
    (version,) = apps["versions"]
    names = [r["resource"] for r in version["resources"]]
    names += [f"{r['resource']}/{s['subresource']}" for r in version["resources"] for s in r["subresources"]]
    assert sorted(names) == sorted(resource["name"] for resource in plain["resources"])
    assert "deployments/scale" in names


def test_quantities() -> None:
    assert rules.quantity("1500m") == rules.quantity(1.5)
    assert rules.quantity("1Ki") == 1024
    assert rules.quantity("2G") == 2_000_000_000
    assert rules.quantity("1e3") == 1000
    with pytest.raises(ValueError, match="quantities"):
        rules.quantity("1 GiB")


def _message(*fields: tuple[int, bytes | int]) -> bytes:
    """Protobuf, of fields that are shorter than 128 bytes."""
    parts = []
    for number, value in fields:
        tag = number << 3 | (0 if isinstance(value, int) else 2)
        parts.append(bytes([tag, value]) if isinstance(value, int) else bytes([tag, len(value)]) + value)
    return b"".join(parts)


def test_protobuf_of_a_secret() -> None:
    labels = _message((1, b"owner"), (2, b"helm"))
    metadata = _message((1, b"sh.helm"), (2, b""), (3, b"default"), (11, labels), (8, b"skipped"))
    secret = _message((1, metadata), (2, _message((1, b"release"), (2, b"\x00\xff"))), (3, b"Opaque"), (5, 1))
    kind = _message((1, b"v1"), (2, b"Secret"))
    assert protobuf.decode(protobuf.MAGIC + _message((1, kind), (2, secret))) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "sh.helm", "namespace": "default", "labels": {"owner": "helm"}},
        "data": {"release": "AP8="},
        "type": "Opaque",
        "immutable": True,
    }
    with pytest.raises(protobuf.UnknownMessage):
        protobuf.decode(protobuf.MAGIC + _message((1, _message((1, b"v1"), (2, b"Node"))), (2, b"")))


def test_roles_and_bindings() -> None:
    store = Store()
    rule = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": ["web"], "verbs": ["patch"]}
    role = Key(Resource(rbac.GROUP, "roles"), "default", "r")
    subject = {"kind": "ServiceAccount", "name": "robot"}
    binding = {"subjects": [subject], "roleRef": {"kind": "Role", "name": "r"}}
    store.create(Key(Resource(rbac.GROUP, "rolebindings"), "default", "r"), binding)
    robot = "system:serviceaccount:default:robot"
    wish = rbac.Wish(
        verb="patch", resource=Resource("apps", "deployments"), subresource="scale", namespace="default", name="web"
    )
    assert not rbac.allowed(store, robot, wish)  # the role is still to come
    store.create(role, {"rules": [rule]})
    assert rbac.allowed(store, robot, wish)
    others = [
        rbac.Wish(verb="get", resource=wish.resource, subresource="scale", namespace="default", name="web"),
        rbac.Wish(verb="patch", resource=wish.resource, subresource="", namespace="default", name="web"),
        rbac.Wish(verb="patch", resource=wish.resource, subresource="scale", namespace="default", name="other"),
        rbac.Wish(verb="patch", resource=wish.resource, subresource="scale", namespace="other", name="web"),
        rbac.Wish(
            verb="patch", resource=Resource("", "deployments"), subresource="scale", namespace="default", name="web"
        ),
    ]
    assert [one for one in others if rbac.allowed(store, robot, one)] == []
    assert not rbac.allowed(store, "system:serviceaccount:other:robot", wish)
    assert all(rbac.allowed(store, rbac.ADMIN, one) for one in others)
    group = {"kind": "Group", "name": "system:serviceaccounts:other"}
    cluster_role = {"subjects": [group], "roleRef": {"kind": "ClusterRole", "name": "all"}}
    store.create(Key(Resource(rbac.GROUP, "clusterrolebindings"), "", "all"), cluster_role)
    anything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    store.create(Key(Resource(rbac.GROUP, "clusterroles"), "", "all"), {"rules": [anything]})
    assert rbac.allowed(store, "system:serviceaccount:other:x", others[2])
    assert not rbac.allowed(store, robot, others[2])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (195, "3m15s"), (600, "10m"), (3 * 3600, "3h"), (9 * 3600, "9h")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


def _ask(store: Store, method: str, path: str, body: str = "", content_type: str = "", **query: str) -> Response:
    return Api(store).answer(
        Request(method=method, path=path, query=query, user=rbac.ADMIN, body=body.encode(), content_type=content_type)
    )


def _store() -> Store:
    store = Store()
    store.create(Key(NAMESPACES, "", "default"), {})
    return store


MAPS = "/api/v1/namespaces/default/configmaps"


def test_yaml_bodies_and_names_that_do_not_match() -> None:
    store = _store()
    assert _ask(store, "POST", MAPS, "metadata: {name: a}\ndata: {n: '1'}").code == 201
    assert store.get(A)["data"] == {"n": "1"}
    answer = _ask(store, "PUT", f"{MAPS}/a", "metadata: {name: b}")
    assert (answer.code, answer.body["reason"]) == (400, "BadRequest")
    assert _ask(store, "POST", MAPS, "{apiVersion: v1, kind: Secret, metadata: {name: b}}").code == 400
    assert _ask(store, "POST", MAPS, "{[").code == 400
    assert _ask(store, "POST", MAPS, "- a").code == 400
    assert _ask(store, "GET", "/api/v1/namespaces/default/configmap").code == 404
    assert _ask(store, "PUT", MAPS, "metadata: {name: b}").code == 405
    assert [key.name for key in store.versions(CONFIG_MAPS)] == ["a"]


def test_custom_resources_have_stricter_writes() -> None:
    store = _store()
    store.create(Key(CRDS, "", "pools.example.dev"), CRD)
    path = "/apis/example.dev/v1/namespaces/default/pools"
    assert _ask(store, "POST", path, "metadata: {name: a}").code == 201
    assert _ask(store, "PATCH", f"{path}/a", "{}", "application/strategic-merge-patch+json").code == 415
    merge = "application/merge-patch+json"
    assert _ask(store, "PATCH", f"{path}/a", '{"spec": {"size": 3}}', merge).body["spec"] == {"size": 3}
    answer = _ask(store, "PUT", f"{path}/a", "spec: {size: 4}")
    assert (answer.code, answer.body["details"]["causes"][0]["field"]) == (422, "metadata.resourceVersion")
    # without conversion, every version serves the same object
    assert _ask(store, "GET", f"{path.replace('v1', 'v1beta1')}/a").body["apiVersion"] == "example.dev/v1beta1"


def test_a_delete_may_name_what_it_means() -> None:
    store = _store()
    uid = store.create(A, {})["metadata"]["uid"]
    assert _ask(store, "DELETE", f"{MAPS}/a", '{"preconditions": {"uid": "other"}}').code == 409
    assert store.get(A)
    assert _ask(store, "DELETE", f"{MAPS}/a", f'{{"preconditions": {{"uid": "{uid}"}}}}').body["details"]["uid"] == uid
    with pytest.raises(Missing):
        store.get(A)


def test_events_name_what_was_before() -> None:
    store = Store()
    with store.changes() as changes:
        store.create(A, {"n": 1})
        store.modify(A, lambda value: value.update(n=2))
        events: list[Event] = [changes.get() for _ in range(2)]
    assert [(event.previous.get("n"), event.object["n"]) for event in events] == [(None, 1), (1, 2)]
