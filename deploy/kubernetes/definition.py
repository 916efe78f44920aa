"""Updates the CustomResourceDefinition of ServingPools: `python -m deploy.kubernetes.definition FILE`.

The chart's hook runs it in the router's image, which has no Kubernetes client. It sends one request, a server-side
apply, which keeps fields that others have added. Access is by the pod's service account or $KUBECONFIG.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton.errors import BatonError, ConfigError, StoreUnavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MANAGER = "baton-crds"
RETRY_S = 2.0
NUM_TRIES = 30
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ApiAccess:
    url: str
    """URL of the API server, without a trailing slash."""
    token: str
    ca: str = ""
    """PEM text of the CA of the server's certificate; empty: this machine's CAs."""


def access_from(environ: Mapping[str, str], account: Path = ACCOUNT) -> ApiAccess:
    """Return the access by $KUBECONFIG (its token), or else by the pod's service account.

    Raises:
        ConfigError: neither exists.
    """
    if path := environ.get("KUBECONFIG"):
        config = yaml.safe_load(Path(path).read_text())
        (context,) = (each["context"] for each in config["contexts"] if each["name"] == config["current-context"])
        (cluster,) = (each["cluster"] for each in config["clusters"] if each["name"] == context["cluster"])
        (user,) = (each["user"] for each in config["users"] if each["name"] == context["user"])
        return ApiAccess(cluster["server"].rstrip("/"), user.get("token", ""))
    host, port = (environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not (account / "token").is_file():
        raise ConfigError(f"there is no access to Kubernetes: no KUBECONFIG, and no token in {account}")
    host = f"[{host}]" if ":" in host else host
    return ApiAccess(
        f"https://{host}:{port}", (account / "token").read_text().strip(), (account / "ca.crt").read_text()
    )


class Refused(Exception):
    """The API server has refused a request.

    Attributes:
        code: its HTTP status, below 500.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def apply(definition: bytes, access: ApiAccess, num_tries: int = NUM_TRIES) -> None:
    """Apply a CustomResourceDefinition (YAML) on the server, and take over the ownership of its fields.

    Raises:
        StoreUnavailable: the API server does not answer after all retries.
        BatonError: it refuses; the message gives the reason.
    """
    name = yaml.safe_load(definition)["metadata"]["name"]
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}?fieldManager={MANAGER}&force=true"
    try:
        call(access, f"PATCH {path}", definition, content_type="application/apply-patch+yaml", num_tries=num_tries)
    except Refused as error:
        raise BatonError(f"Kubernetes refuses the definition {name}: {error}") from error


def call(
    access: ApiAccess,
    request_line: str,
    body: bytes | None = None,
    *,
    content_type: str = "application/json",
    num_tries: int = NUM_TRIES,
) -> bytes:
    """Send a request to the API server, again if it is busy, and return the body of its response.

    Args:
        request_line: method and path, such as `GET /version`.

    Raises:
        StoreUnavailable: the API server does not answer after all retries.
        Refused: it refuses; the message gives the reason.
    """
    method, _, path = request_line.partition(" ")
    request = urllib.request.Request(
        f"{access.url}{path}",
        data=body,
        headers={"Authorization": f"Bearer {access.token}", "Content-Type": content_type},
        method=method,
    )
    context = ssl.create_default_context(cadata=access.ca or None)
    for left in reversed(range(num_tries)):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
                response: bytes = answer.read()
                return response
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise Refused(error.code, _reason(error)) from error
            reason = _reason(error)
        except OSError as error:
            reason = str(error)
        if left:
            time.sleep(RETRY_S)
    raise StoreUnavailable(f"Kubernetes' API at {access.url} does not answer: {reason}")


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {text[:200]}"


def main() -> None:
    path = Path(sys.argv[1])
    try:
        apply(path.read_bytes(), access_from(os.environ))
    except BatonError as error:
        sys.exit(
            f"{error}. Without the chart's hook (crds.upgrade=false): helm show crds CHART | kubectl apply "
            "--server-side --force-conflicts -f -"
        )
    sys.stdout.write(f"The definition in {path} is applied.\n")


if __name__ == "__main__":
    main()
