"""Who may do what: Roles and ClusterRoles, as bindings in the store give them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.fakekube.store import Key, Missing, Object, Resource, Store

GROUP = "rbac.authorization.k8s.io"
ADMIN = "admin"
SERVICE_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    verb: str
    resource: Resource
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    @property
    def path(self) -> str:
        """The resource as rules name it: deployments/scale."""
        return f"{self.resource.plural}/{self.subresource}".rstrip("/")


def allowed(store: Store, user: str, wish: Wish) -> bool:
    """The admin may do everything."""
    return user == ADMIN or any(_covers(rule, wish) for rule in _rules(store, user, wish.namespace))


def forbidden(user: str, wish: Wish) -> str:
    """What a real server says."""
    named = f"{wish.resource.plural}.{wish.resource.group}".rstrip(".") + (f' "{wish.name}"' if wish.name else "")
    where = f'in the namespace "{wish.namespace}"' if wish.namespace else "at the cluster scope"
    what = f'cannot {wish.verb} resource "{wish.path}" in API group "{wish.resource.group}"'
    return f'{named} is forbidden: User "{user}" {what} {where}'


def _rules(store: Store, user: str, namespace: str) -> Iterator[Object]:
    bindings = store.objects(Resource(GROUP, "clusterrolebindings"))
    if namespace:
        bindings += store.objects(Resource(GROUP, "rolebindings"), namespace)
    for binding in bindings:
        if any(_is(subject, user, binding) for subject in binding.get("subjects") or ()):
            role = binding["roleRef"]
            plural = f"{role['kind'].lower()}s"
            where = binding["metadata"].get("namespace", "") if role["kind"] == "Role" else ""
            try:
                yield from store.get(Key(Resource(GROUP, plural), where, role["name"])).get("rules") or ()
            except Missing:
                continue  # a binding may come before its role


def _is(subject: Object, user: str, binding: Object) -> bool:
    if subject["kind"] == "ServiceAccount":
        namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
        return user == f"{SERVICE_ACCOUNT}{namespace}:{subject['name']}"
    if subject["kind"] == "Group":
        return subject["name"] in _groups(user)
    return bool(subject["name"] == user)


def _groups(user: str) -> list[str]:
    groups = ["system:authenticated"]
    if user.startswith(SERVICE_ACCOUNT):
        namespace = user.removeprefix(SERVICE_ACCOUNT).partition(":")[0]
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    return groups


def _covers(rule: Object, wish: Wish) -> bool:
    resources = rule.get("resources") or ()
    names = rule.get("resourceNames") or ()
    return (
        bool({"*", wish.verb} & set(rule["verbs"]))
        and bool({"*", wish.resource.group} & set(rule.get("apiGroups") or ()))
        and bool({"*", wish.path, f"*/{wish.subresource}" if wish.subresource else "*"} & set(resources))
        and (not names or wish.name in names)
    )
