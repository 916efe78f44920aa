"""The kinds of objects the API server serves: Kubernetes' own, and those that CRDs in the store define."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from tests.fakekube import schema
from tests.fakekube.store import Key, Object, Resource, Store

CRDS = Resource("apiextensions.k8s.io", "customresourcedefinitions")
NAMESPACES = Resource("", "namespaces")
PODS = Resource("", "pods")


@dataclass(frozen=True, slots=True)
class Scale:
    """Where an object keeps what its `/scale` shows, as dotted paths."""

    replicas: str = ".spec.replicas"
    status_replicas: str = ".status.replicas"
    selector: str = ".spec.selector"
    """Of a LabelSelector, or of a string which is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    path: str
    """In JSONPath."""
    type: str = "string"
    priority: int = 0
    """More than 0: shown with `-o wide`."""
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class Kind:
    resource: Resource
    version: str
    name: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    status: bool = False
    """Has a status that only `/status` changes."""
    scale: Scale | None = None
    columns: tuple[Column, ...] = ()
    categories: tuple[str, ...] = ()
    singular: str = ""
    list_name: str = ""
    openapi: Object | None = field(default=None, repr=False)
    """The schema of a custom resource. None: the kind is one of Kubernetes' own."""

    @property
    def api_version(self) -> str:
        return f"{self.resource.group}/{self.version}".lstrip("/")

    @property
    def custom(self) -> bool:
        return self.openapi is not None

    @property
    def qualified_plural(self) -> str:
        """As messages name it: deployments.apps."""
        return f"{self.resource.plural}.{self.resource.group}".rstrip(".")

    @property
    def subresources(self) -> list[str]:
        return ["status"] * self.status + ["scale"] * (self.scale is not None) + ["log"] * (self.resource == PODS)

    @cached_property
    def schema(self) -> schema.Schema:
        if self.openapi is not None:
            return schema.of_custom(self.openapi)
        return schema.builtin(self.name, self.api_version)


def _group(group: str, version: str, *rows: tuple[str, str, str], categories: tuple[str, ...] = ()) -> list[Kind]:
    """Rows of: kind, short names, and marks: c cluster-wide, s status, r scale (replicas), a in `kubectl get all`."""
    made = []
    for name, short, marks in rows:
        made.append(
            Kind(
                resource=Resource(group, _plural(name.lower())),
                version=version,
                name=name,
                namespaced="c" not in marks,
                short_names=tuple(short.split()),
                status="s" in marks,
                scale=Scale() if "r" in marks else None,
                categories=("all",) * ("a" in marks),
                singular=name.lower(),
                list_name=f"{name}List",
            )
        )
    return made


def _plural(singular: str) -> str:
    if singular == "endpoints":
        return singular
    return re.sub(r"s$", "se", re.sub(r"y$", "ie", singular)) + "s"


BUILTIN: list[Kind] = [
    *_group(
        "",
        "v1",
        ("Namespace", "ns", "cs"),
        ("Node", "no", "cs"),
        ("Pod", "po", "sa"),
        ("Service", "svc", "sa"),
        ("Endpoints", "ep", ""),
        ("ConfigMap", "cm", ""),
        ("Secret", "", ""),
        ("ServiceAccount", "sa", ""),
        ("Event", "ev", ""),
        ("PersistentVolume", "pv", "cs"),
        ("PersistentVolumeClaim", "pvc", "s"),
        ("LimitRange", "limits", ""),
        ("ResourceQuota", "quota", "s"),
    ),
    *_group(
        "apps",
        "v1",
        ("Deployment", "deploy", "sra"),
        ("ReplicaSet", "rs", "sra"),
        ("StatefulSet", "sts", "sra"),
        ("DaemonSet", "ds", "sa"),
        ("ControllerRevision", "", ""),
    ),
    *_group("batch", "v1", ("Job", "", "sa"), ("CronJob", "cj", "sa")),
    *_group("autoscaling", "v2", ("HorizontalPodAutoscaler", "hpa", "sa")),
    *_group("policy", "v1", ("PodDisruptionBudget", "pdb", "s")),
    *_group("networking.k8s.io", "v1", ("NetworkPolicy", "netpol", ""), ("Ingress", "ing", "s")),
    *_group("discovery.k8s.io", "v1", ("EndpointSlice", "", "")),
    *_group("coordination.k8s.io", "v1", ("Lease", "", "")),
    *_group("storage.k8s.io", "v1", ("StorageClass", "sc", "c")),
    *_group("scheduling.k8s.io", "v1", ("PriorityClass", "pc", "c")),
    *_group(
        "rbac.authorization.k8s.io",
        "v1",
        ("Role", "", ""),
        ("RoleBinding", "", ""),
        ("ClusterRole", "", "c"),
        ("ClusterRoleBinding", "", "c"),
    ),
    *_group(
        "admissionregistration.k8s.io",
        "v1",
        ("ValidatingAdmissionPolicy", "", "cs"),
        ("ValidatingAdmissionPolicyBinding", "", "c"),
    ),
    *_group(CRDS.group, "v1", ("CustomResourceDefinition", "crd crds", "cs")),
]


class Kinds:
    """What is served now. A CRD counts from its creation on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._custom: dict[tuple[Key, str], list[Kind]] = {}

    def all(self) -> list[Kind]:
        """Of each group, the preferred version comes first."""
        versions = self._store.versions(CRDS)
        self._custom = {
            (key, version): self._custom.get((key, version)) or of_crd(self._store.get(key))
            for key, version in versions.items()
        }
        return BUILTIN + [kind for kinds in self._custom.values() for kind in kinds]

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        matching = (k for k in self.all() if k.resource == Resource(group, plural) and k.version == version)
        return next(matching, None)


def of_crd(crd: Object) -> list[Kind]:
    """One for each version that is served."""
    spec, names = crd["spec"], crd["spec"]["names"]
    made = []
    for version in sorted(spec["versions"], key=lambda served: _rank(served["name"]), reverse=True):
        if not version["served"]:
            continue
        subresources = version.get("subresources") or {}
        columns = [
            Column(
                name=c["name"],
                path=c["jsonPath"],
                type=c["type"],
                priority=c.get("priority", 0),
                description=c.get("description", ""),
            )
            for c in version.get("additionalPrinterColumns", ())
        ]
        made.append(
            Kind(
                resource=Resource(spec["group"], names["plural"]),
                version=version["name"],
                name=names["kind"],
                namespaced=spec["scope"] == "Namespaced",
                short_names=tuple(names.get("shortNames", ())),
                status="status" in subresources,
                scale=_scale(subresources["scale"]) if "scale" in subresources else None,
                columns=tuple(columns or [Column(name="Age", path=".metadata.creationTimestamp", type="date")]),
                categories=tuple(names.get("categories", ())),
                singular=names.get("singular") or names["kind"].lower(),
                list_name=names.get("listKind") or f"{names['kind']}List",
                openapi=version.get("schema", {}).get("openAPIV3Schema", schema.ANYTHING),
            )
        )
    return made


def _scale(paths: Object) -> Scale:
    return Scale(paths["specReplicasPath"], paths["statusReplicasPath"], paths.get("labelSelectorPath", ""))


def _rank(version: str) -> tuple[int, int, int]:
    """Kubernetes' order of versions: v2, v1, v1beta1, v1alpha1."""
    parts = re.fullmatch(r"v(\d+)(?:(alpha|beta)(\d+))?", version)
    if parts is None:
        return (-1, 0, 0)
    return ({"alpha": 0, "beta": 1, None: 2}[parts[2]], int(parts[1]), int(parts[3] or 0))
