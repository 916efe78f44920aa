"""What the API server says about itself: groups, resources, versions, and which queries a write takes."""

from __future__ import annotations

from collections.abc import Iterable

from tests.fakekube.kinds import Kind
from tests.fakekube.schema import VERSION
from tests.fakekube.store import Object

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
QUERIES = ("dryRun", "fieldManager", "fieldValidation")


def document(parts: list[str], kinds: list[Kind], accept: str) -> tuple[Object, str] | None:
    """The body and its content type. None: the path names no such document."""
    aggregated = "as=APIGroupDiscoveryList" in accept and "v=v2;" in f"{accept.replace(',', ';')};"
    match parts:
        case ["version"]:
            major, minor, _ = VERSION.split(".")
            return _plain({"major": major, "minor": minor, "gitVersion": f"v{VERSION}", "platform": "linux/amd64"})
        case ["api"] if aggregated:
            return _aggregated([kind for kind in kinds if not kind.resource.group])
        case ["apis"] if aggregated:
            return _aggregated([kind for kind in kinds if kind.resource.group])
        case ["api"]:
            return _plain({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        case ["apis"]:
            groups = dict.fromkeys(kind.resource.group for kind in kinds if kind.resource.group)
            return _plain({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(g, kinds) for g in groups]})
        case ["apis", group] if any(kind.resource.group == group for kind in kinds):
            return _plain({"kind": "APIGroup", "apiVersion": "v1"} | _group(group, kinds))
        case ["api", _] | ["apis", _, _]:
            served = _served("/".join(parts[1:]), kinds)
            return _plain(_resources(served)) if served else None
        case ["openapi", "v3"]:
            paths = dict.fromkeys(_prefix(kind) for kind in kinds)
            return _plain({"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in paths}})
        case ["openapi", "v3", *path]:
            served = [kind for kind in kinds if _prefix(kind) == "/".join(path)]
            return _plain(_openapi(served)) if served else None
    return None


def _plain(body: Object) -> tuple[Object, str]:
    return body, "application/json"


def _prefix(kind: Kind) -> str:
    return f"apis/{kind.api_version}" if kind.resource.group else f"api/{kind.version}"


def _served(api_version: str, kinds: Iterable[Kind]) -> list[Kind]:
    return [kind for kind in kinds if kind.api_version == api_version]


def _group(name: str, kinds: list[Kind]) -> Object:
    versions = list(dict.fromkeys(kind.version for kind in kinds if kind.resource.group == name))
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _resources(kinds: list[Kind]) -> Object:
    resources: list[Object] = []
    for kind in kinds:
        resources.append(
            {
                "name": kind.resource.plural,
                "singularName": kind.singular,
                "namespaced": kind.namespaced,
                "kind": kind.name,
                "verbs": VERBS,
                "shortNames": list(kind.short_names),
                "categories": list(kind.categories),
            }
        )
        for subresource in kind.subresources:
            shown = {"group": "autoscaling", "version": "v1"} if subresource == "scale" else {}
            resources.append(
                {
                    "name": f"{kind.resource.plural}/{subresource}",
                    "singularName": "",
                    "namespaced": kind.namespaced,
                    "kind": "Scale" if subresource == "scale" else kind.name,
                    "verbs": ["get", "patch", "update"],
                    **shown,
                }
            )
    api_version = kinds[0].api_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": resources}


def _aggregated(kinds: list[Kind]) -> tuple[Object, str]:
    groups: dict[str, dict[str, list[Object]]] = {}
    for kind in kinds:
        resource: Object = {
            "resource": kind.resource.plural,
            "responseKind": _response_kind(kind),
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "singularResource": kind.singular,
            "verbs": VERBS,
            "shortNames": list(kind.short_names),
            "categories": list(kind.categories),
            "subresources": [
                {
                    "subresource": name,
                    "responseKind": SCALE_KIND if name == "scale" else _response_kind(kind),
                    "verbs": ["get", "patch", "update"],
                }
                for name in kind.subresources
            ],
        }
        groups.setdefault(kind.resource.group, {}).setdefault(kind.version, []).append(resource)
    items = [
        {
            "metadata": {"name": group},
            "versions": [
                {"version": version, "freshness": "Current", "resources": resources}
                for version, resources in versions.items()
            ],
        }
        for group, versions in groups.items()
    ]
    body = {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}
    return body, AGGREGATED


SCALE_KIND = {"group": "autoscaling", "version": "v1", "kind": "Scale"}


def _response_kind(kind: Kind) -> Object:
    return {"group": kind.resource.group, "version": kind.version, "kind": kind.name}


def _openapi(kinds: list[Kind]) -> Object:
    """Without schemas: clients look here for the queries that a write takes, and leave the checks to the server."""
    queries = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in QUERIES]
    paths: Object = {}
    for kind in kinds:
        where = "/namespaces/{namespace}" if kind.namespaced else ""
        base = f"/{_prefix(kind)}{where}/{kind.resource.plural}"
        write = {"parameters": queries, "x-kubernetes-group-version-kind": _response_kind(kind), "responses": {}}
        paths[base] = {"post": write}
        paths[f"{base}/{{name}}"] = {"patch": write, "put": write}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": f"v{VERSION}"},
        "paths": paths,
        "components": {"schemas": {}},
    }
