"""The definition of ServingPools, applied by one request: to the test API server, and to ones that answer otherwise."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from baton.errors import BatonError, ConfigError, StoreUnavailable
from deploy.kubernetes import definition
from deploy.kubernetes.definition import ApiAccess, access_from, apply
from tests.fakekube.apiserver import running_api
from tests.fakekube.store import Key, Resource

CRD = Path(__file__).parents[4] / "helm" / "baton" / "crds" / "servingpools.yaml"
CRDS = Resource("apiextensions.k8s.io", "customresourcedefinitions")


def test_an_older_definition_becomes_this_one_and_keeps_what_others_added(monkeypatch: pytest.MonkeyPatch) -> None:
    older = yaml.safe_load(CRD.read_text())
    (version,) = older["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["paused"]
    version["additionalPrinterColumns"].pop()
    older["metadata"]["annotations"] = {"team": "ml"}
    with running_api() as api:
        key = Key(CRDS, "", "servingpools.baton.dev")
        api.store.create(key, older)
        access = access_from({"KUBECONFIG": str(api.kubeconfig())})
        for _ in range(2):  # a second time it changes nothing
            apply(CRD.read_bytes(), access)
            found = api.store.get(key)
            assert (
                found["spec"]["versions"][0]["schema"]
                == yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]
            )
            assert len(found["spec"]["versions"][0]["additionalPrinterColumns"]) == 6
            assert found["metadata"]["annotations"] == {"team": "ml"}
        stranger = access_from({"KUBECONFIG": str(api.kubeconfig("system:serviceaccount:a:b"))})
        with pytest.raises(BatonError, match=r"refuses the definition servingpools\.baton\.dev: .*orbidden"):
            apply(CRD.read_bytes(), stranger)


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that answers each request with the next status. Yields its URL, and the requests' headers."""
    left, seen = list(statuses), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append({**self.headers, "path": self.path})
            body = b'{"message": "not today"}'
            self.send_response(left.pop(0))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()


def test_a_server_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "RETRY_S", 0.0)
    with answering(503, 500, 200) as (url, seen):
        apply(CRD.read_bytes(), ApiAccess(url, "word"))
    assert [each["Authorization"] for each in seen] == ["Bearer word"] * 3
    assert {each["Content-Type"] for each in seen} == {"application/apply-patch+yaml"}
    assert seen[0]["path"].endswith(
        "/customresourcedefinitions/servingpools.baton.dev?fieldManager=baton-crds&force=true"
    )
    with answering(503, 503) as (url, _), pytest.raises(StoreUnavailable, match="does not answer: not today"):
        apply(CRD.read_bytes(), ApiAccess(url, "word"), num_tries=2)
    with pytest.raises(StoreUnavailable, match=r"does not answer: .*refused"):
        apply(CRD.read_bytes(), ApiAccess("http://127.0.0.1:1", "word"), num_tries=1)


def test_access_is_the_pod_s_account(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no token in {tmp_path}"):
        access_from({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}, tmp_path)
    (tmp_path / "token").write_text("word\n")
    (tmp_path / "ca.crt").write_text("pem")
    for host, url in (("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")):
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}
        assert access_from(environ, tmp_path) == ApiAccess(url, "word", "pem")


def test_a_failure_is_a_sentence_that_names_the_way_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["definition", str(CRD)])
    monkeypatch.setattr(definition, "access_from", lambda _: ApiAccess("http://127.0.0.1:1", "word"))
    monkeypatch.setattr(definition, "RETRY_S", 0.0)
    with pytest.raises(SystemExit, match=r"does not answer: .* helm show crds CHART \| kubectl apply --server-side"):
        definition.main()
