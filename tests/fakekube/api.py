"""The verbs of the Kubernetes API, over a store: a request goes in, a response comes out.

A write goes this way: may this user do it (`rbac`); the body, decoded (`protobuf`, YAML, JSON); the new object, out of
the live one and a patch (`patch`, `ownership`); pruned, defaulted and checked (`admission`); who owns what in it
(`ownership`); the store. A dry run takes the same way over a store of its own.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.fakekube import admission, discovery, garbage, ownership, patch, rbac
from tests.fakekube.kinds import NAMESPACES, Kind, Kinds
from tests.fakekube.messages import (
    APPLY,
    HEAD,
    Request,
    Response,
    Target,
    body_of,
    metadata_of,
    parsed,
    selected_name,
    selection,
)
from tests.fakekube.ownership import Manager
from tests.fakekube.scale import check_readable, scale_of, scaled
from tests.fakekube.status import Refused, already_exists, bad_request, conflict, invalid, not_found, stale
from tests.fakekube.store import Exists, Key, Missing, Object, Resource, Stale, Store
from tests.fakekube.streams import events, log_lines
from tests.fakekube.table import table

LOG_ANNOTATION = "baton.dev/test-log"
"""Of a pod: a JSON object of its containers' names and the paths of their logs. The kubelet sets it."""


class Api:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._kinds = Kinds(store)

    def answer(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except Refused as refused:
            return Response(code=refused.code, body=refused.status())

    def _answer(self, request: Request) -> Response:
        parts = [part for part in request.path.split("/") if part]
        if request.method == "GET":
            if parts in (["healthz"], ["readyz"], ["livez"]):
                return Response(code=200, content_type="text/plain", stream=iter([b"ok"]))
            found = discovery.document(parts, self._kinds.all(), request.accept)
            if found is not None:
                return Response(code=200, body=found[0], content_type=found[1])
        if request.method == "POST" and parts[:1] == ["apis"] and parts[3:] == ["selfsubjectaccessreviews"]:
            return Response(code=201, body=self._review(request))
        target = self._target(parts)
        self._authorize(target, request)
        return self._verb(target, request)(target, request)

    def _verb(self, target: Target, request: Request) -> Callable[[Target, Request], Response]:
        if target.subresource == "log" and request.method == "GET":
            return self._log
        verbs: dict[str, Callable[[Target, Request], Response]]
        if target.name:
            verbs = {"GET": self._get, "PUT": self._replace, "PATCH": self._patch}
            if not target.subresource:
                verbs["DELETE"] = self._delete
        else:
            verbs = {"GET": self._list, "POST": self._create, "DELETE": self._delete_collection}
            if request.flag("watch"):
                verbs["GET"] = self._watch
        if request.method not in verbs:
            raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        return verbs[request.method]

    def _target(self, parts: list[str]) -> Target:
        unknown = Refused(404, "NotFound", "the server could not find the requested resource")
        match parts:
            case ["api", version, *rest]:
                group = ""
            case ["apis", group, version, *rest]:
                pass
            case _:
                raise unknown
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource, *more = [*rest, "", "", ""]
        kind = self._kinds.find(group, version, plural)
        if kind is None or any(more) or (namespace and not kind.namespaced):
            raise unknown
        if subresource and subresource not in kind.subresources:
            raise unknown
        if name and kind.namespaced and not namespace:
            raise unknown
        return Target(kind, namespace, name, subresource)

    def _authorize(self, target: Target, request: Request) -> None:
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs.get(request.method, "get")
        if not target.name and request.method in ("GET", "DELETE"):
            verb = "deletecollection" if verb == "delete" else "watch" if request.flag("watch") else "list"
        name = target.name or selected_name(request.query.get("fieldSelector", ""))
        wish = rbac.Wish(
            verb=verb,
            resource=target.kind.resource,
            subresource=target.subresource,
            namespace=target.namespace,
            name=name,
        )
        if not rbac.allowed(self._store, request.user, wish):
            raise Refused(403, "Forbidden", rbac.forbidden(request.user, wish))

    def _review(self, request: Request) -> Object:
        review = body_of(request)
        asked = review["spec"].get("resourceAttributes") or {}
        wish = rbac.Wish(
            verb=asked.get("verb", ""),
            resource=Resource(asked.get("group", ""), asked.get("resource", "")),
            subresource=asked.get("subresource", ""),
            namespace=asked.get("namespace", ""),
            name=asked.get("name", ""),
        )
        return review | {"status": {"allowed": rbac.allowed(self._store, request.user, wish)}}

    def _get(self, target: Target, request: Request) -> Response:
        try:
            value = self._store.get(target.key)
        except Missing:
            raise not_found(target.kind, target.name) from None
        if target.subresource == "scale":
            check_readable(target.kind, value)
        return Response(code=200, body=self._shown(target, request, value))

    def _list(self, target: Target, request: Request) -> Response:
        version = self._store.version
        wanted = selection(request)
        found = [value for value in self._store.objects(target.kind.resource, target.namespace) if wanted(value)]
        items = [_versioned(target.kind, value) for value in found]
        if request.wants_table:
            return Response(code=200, body=table(target.kind, items, version))
        shown = {"kind": target.kind.list_name, "apiVersion": target.kind.api_version}
        return Response(code=200, body=shown | {"metadata": {"resourceVersion": version}, "items": items})

    def _watch(self, target: Target, request: Request) -> Response:
        def shown(value: Object) -> Object:
            return self._shown(target, request, value)

        return Response(code=200, stream=events(self._store, target, request, selection(request), shown))

    def _log(self, target: Target, request: Request) -> Response:
        pod = self._get(Target(target.kind, target.namespace, target.name), request).body
        paths = json.loads(pod["metadata"].get("annotations", {}).get(LOG_ANNOTATION, "{}"))
        name = request.query.get("container") or pod["spec"]["containers"][0]["name"]
        if name not in paths or not Path(paths[name]).exists():
            raise bad_request(f'container "{name}" in pod "{target.name}" is waiting to start')
        lines = log_lines(self._store, target.key, name, Path(paths[name]), request)
        return Response(code=200, content_type="text/plain", stream=lines)

    def _shown(self, target: Target, request: Request, value: Object) -> Object:
        if target.subresource == "scale":
            return scale_of(target.kind, value)
        value = _versioned(target.kind, value)
        return table(target.kind, [value], self._store.version) if request.wants_table else value

    def _create(self, target: Target, request: Request) -> Response:
        value = body_of(request)
        metadata = metadata_of(target, value)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        named = Target(target.kind, target.namespace, metadata.get("name", ""))
        if not named.name:
            raise invalid(
                target.kind, "", [("FieldValueRequired", "name or generateName is required", "metadata.name")]
            )
        for server_side in ("resourceVersion", "managedFields"):
            metadata.pop(server_side, None)
        self._check_namespace(named)
        warnings = admission.decode(target.kind, value, request.field_validation)
        manager = Manager(request.manager, "Update", target.kind.api_version)
        return self._made(named, request, value, manager, warnings)

    def _made(self, target: Target, request: Request, value: Object, manager: Manager, warnings: list[str]) -> Response:
        kind = target.kind
        if kind.status:
            value.pop("status", None)
        wanted = copy.deepcopy(value)
        admission.check(kind, value, None)
        if manager.operation == "Apply":
            value = ownership.with_owners(
                value, {manager: ownership.Owned(ownership.owned_paths(wanted, kind.schema))}, {}
            )
        else:
            value = ownership.updated({}, value, manager, kind.schema)
        if kind.status and (status := admission.first_status(kind, value)):
            value["status"] = status
        try:
            stored = self._store_for(target, request.dry_run).create(target.key, value)
        except Exists:
            raise already_exists(kind, target.name) from None
        return Response(code=201, body=_versioned(kind, stored), warnings=warnings)

    def _replace(self, target: Target, request: Request) -> Response:
        body = body_of(request)
        if target.subresource == "scale":
            return self._modified(target, request, lambda live: scaled(target.kind, live, body))
        metadata = metadata_of(target, body)
        if target.kind.custom and not metadata.get("resourceVersion"):
            why = "Invalid value: 0: must be specified for an update"
            raise invalid(target.kind, target.name, [("FieldValueInvalid", why, "metadata.resourceVersion")])
        return self._modified(target, request, lambda live: body)

    def _patch(self, target: Target, request: Request) -> Response:
        content_type = request.content_type.partition(";")[0]
        if content_type == APPLY:
            return self._apply(target, request)
        body = parsed(request.body)

        def patched(value: Object) -> Object:
            try:
                if content_type == "application/json-patch+json":
                    return patch.json_patch(value, body)
                if content_type == "application/strategic-merge-patch+json" and not target.kind.custom:
                    return patch.strategic(value, body, target.kind.schema)
            except patch.BadPatch as bad:
                raise invalid(target.kind, target.name, [("FieldValueInvalid", str(bad), "patch")]) from None
            if content_type == "application/merge-patch+json":
                merged: Object = patch.merge(value, body)
                return merged
            said = "the body of the request was in an unknown format - accepted media types include: "
            types = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
            raise Refused(415, "UnsupportedMediaType", said + types)

        if target.subresource == "scale":
            kind = target.kind
            return self._modified(target, request, lambda live: scaled(kind, live, patched(scale_of(kind, live))))
        return self._modified(target, request, patched)

    def _apply(self, target: Target, request: Request) -> Response:
        kind = target.kind
        wanted = parsed(request.body)
        if metadata_of(target, wanted).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        if "fieldManager" not in request.query:
            raise bad_request(
                "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply"
            )
        warnings = admission.decode(kind, wanted, request.field_validation)
        manager = Manager(request.manager, "Apply", kind.api_version, target.subresource)
        if target.subresource == "status":
            wanted = {name: part for name, part in wanted.items() if name in (*HEAD, "status")}
        elif kind.status:
            wanted.pop("status", None)

        def merged(live: Object) -> Object:
            try:
                return ownership.applied(live, wanted, manager, kind.schema, request.flag("force"))
            except ownership.Conflicts as conflicts:
                causes = [
                    ("FieldManagerConflict", f"conflict with {other}", path)
                    for other, paths in conflicts.fields.items()
                    for path in paths
                ]
                raise conflict(kind, target.name, str(conflicts), causes) from None

        try:
            self._store.get(target.key)
        except Missing:
            if not target.subresource:
                self._check_namespace(target)
                return self._made(target, request, wanted, manager, warnings)
        return self._modified(target, request, merged, warnings)

    def _modified(
        self,
        target: Target,
        request: Request,
        build: Callable[[Object], Object],
        warnings: list[str] | None = None,
    ) -> Response:
        """`build` makes the new object of the live one, as the client wants it.

        Args:
            warnings: of server-side apply, which keeps its own books on who owns what. None: an update.
        """
        kind = target.kind
        said = list(warnings or ())

        def change(live: Object) -> None:
            new = copy.deepcopy(build(_versioned(kind, copy.deepcopy(live))))
            metadata = metadata_of(target, new)
            if metadata.get("uid", live["metadata"]["uid"]) != live["metadata"]["uid"]:
                raise conflict(kind, target.name, f"Precondition failed: UID in precondition: {metadata['uid']}")
            if not metadata.get("resourceVersion"):
                metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
            if warnings is None:
                said.extend(admission.decode(kind, new, request.field_validation))
            new = admission.allowed_part(kind, target.subresource, live, new)
            admission.check(kind, new, live)
            if warnings is None:
                manager = Manager(request.manager, "Update", kind.api_version, target.subresource)
                new = ownership.updated(live, new, manager, kind.schema)
            live.clear()
            live.update(new)

        try:
            stored = self._store_for(target, request.dry_run).modify(target.key, change)
        except Missing:
            raise not_found(kind, target.name) from None
        except Stale:
            raise stale(kind, target.name) from None
        shown = scale_of(kind, stored) if target.subresource == "scale" else _versioned(kind, stored)
        return Response(code=200, body=shown, warnings=said)

    def _delete(self, target: Target, request: Request) -> Response:
        options = parsed(request.body) if request.body else {}
        dry = request.dry_run or bool(options.get("dryRun"))
        propagation = options.get("propagationPolicy") or request.query.get("propagationPolicy") or "Background"
        grace_s = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        try:
            value = self._store.get(target.key)
            for name, wanted in (options.get("preconditions") or {}).items():
                if value["metadata"].get(name) != wanted:
                    why = f"the {name} in the precondition ({wanted}) does not match"
                    raise conflict(target.kind, target.name, f"Operation cannot be fulfilled: {why}")
            store = self._store_for(target, dry)
            deleted = garbage.delete(store, target.key, propagation, None if grace_s is None else float(grace_s))
        except Missing:
            raise not_found(target.kind, target.name) from None
        if deleted["metadata"].get("deletionTimestamp") and not dry:
            return Response(code=200, body=_versioned(target.kind, deleted))
        details = {"name": target.name, "group": target.kind.resource.group, "kind": target.kind.resource.plural}
        details["uid"] = deleted["metadata"]["uid"]
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return Response(code=200, body=done)

    def _delete_collection(self, target: Target, request: Request) -> Response:
        listed = self._list(
            target, Request(method="GET", path=request.path, query=request.query, user=request.user)
        ).body
        for value in listed["items"]:
            metadata = value["metadata"]
            self._delete(Target(target.kind, metadata.get("namespace", ""), metadata["name"]), request)
        return Response(code=200, body=listed)

    def _store_for(self, target: Target, dry_run: bool) -> Store:
        return self._store.scratch(target.key) if dry_run else self._store

    def _check_namespace(self, target: Target) -> None:
        if not target.namespace:
            return
        try:
            namespace = self._store.get(Key(NAMESPACES, "", target.namespace))
        except Missing:
            raise Refused(404, "NotFound", f'namespaces "{target.namespace}" not found') from None
        if namespace["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {target.namespace} because it is being terminated"
            raise Refused(403, "Forbidden", f'{target.kind.qualified_plural} "{target.name}" is forbidden: {why}')


def _versioned(kind: Kind, value: Object) -> Object:
    """In the version that was asked for."""
    return value | {"apiVersion": kind.api_version, "kind": kind.name}
