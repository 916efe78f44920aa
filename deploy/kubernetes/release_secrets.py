"""Creates the Secrets of a release that are absent: `python -m deploy.kubernetes.release_secrets NAMESPACE SECRET...`.

The chart's hook runs it in the router's image, before helm makes or changes anything else. Each SECRET is JSON: `name`,
`labels`, `annotations` and `keys`, which are the names of random values with their lengths. An existing value is never
changed; a key that a Secret lacks is added. Access is by the pod's service account or $KUBECONFIG.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from deploy.kubernetes.definition import ApiAccess, Refused, access_from, call

LETTERS = string.ascii_letters + string.digits
NOT_FOUND, CONFLICT = 404, 409


@dataclass(frozen=True, slots=True)
class WantedSecret:
    """A Secret of random values."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    keys: Mapping[str, int]
    """Length of each value, in characters."""

    def values(self, names: frozenset[str]) -> dict[str, str]:
        """Return new random values of these keys, in base64."""
        return {name: _random(length) for name, length in self.keys.items() if name in names}

    def fresh(self, namespace: str) -> dict[str, Any]:
        """Return the whole object, with new values."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": self.name,
                "namespace": namespace,
                "labels": {**self.labels},
                "annotations": {**self.annotations},
            },
            "data": self.values(frozenset(self.keys)),
        }


def ensure(wanted: WantedSecret, namespace: str, access: ApiAccess) -> str:
    """Create the Secret, or add the keys that it lacks. Return what has been done.

    Raises:
        StoreUnavailable: the API server does not answer after all retries.
        Refused: it refuses; the message gives the reason.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets"
    try:
        found = json.loads(call(access, f"GET {path}/{wanted.name}"))
    except Refused as error:
        if error.code != NOT_FOUND:
            raise
        try:
            call(access, f"POST {path}", json.dumps(wanted.fresh(namespace)).encode())
            return "created"
        except Refused as refused:
            if refused.code != CONFLICT:
                raise
            return ensure(wanted, namespace, access)  # somebody else was faster
    missing = frozenset(wanted.keys) - (found.get("data") or {}).keys()
    noted = found["metadata"].get("annotations") or {}
    if not missing and wanted.annotations.items() <= noted.items():
        return "kept"
    change = {"metadata": {"annotations": {**wanted.annotations}}, "data": wanted.values(missing)}
    body = json.dumps(change).encode()
    call(access, f"PATCH {path}/{wanted.name}", body, content_type="application/merge-patch+json")
    return f"kept, with new values of {', '.join(sorted(missing))}" if missing else "kept"


def _random(length: int) -> str:
    text = "".join(secrets.choice(LETTERS) for _ in range(length))
    return base64.b64encode(text.encode()).decode()


def main() -> None:
    namespace, *wanted = sys.argv[1:]
    try:
        access = access_from(os.environ)
        for each in (WantedSecret(**json.loads(text)) for text in wanted):
            sys.stdout.write(f"Secret {each.name}: {ensure(each, namespace, access)}.\n")
    except (BatonError, Refused) as error:
        sys.exit(
            f"the Secrets of the release cannot be created: {error}. Without the chart's hook: create them, and name "
            "them in the existingSecret of clusterSecret, router.cacheSecret, ray.token, redis.passwords and "
            "ray.store.password"
        )


if __name__ == "__main__":
    main()
