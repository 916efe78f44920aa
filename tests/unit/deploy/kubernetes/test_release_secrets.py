"""The Secrets that the chart's hook creates: on the test API server, and beside somebody who is faster."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator

import pytest

from baton.errors import BatonError
from deploy.kubernetes import definition, release_secrets
from deploy.kubernetes.definition import ApiAccess, Refused, access_from
from deploy.kubernetes.release_secrets import WantedSecret, ensure
from tests.fakekube.apiserver import RunningApi, running_api
from tests.fakekube.store import Key, Object, Resource

SECRETS = Resource("", "secrets")
WANTED = WantedSecret("baton-redis", {"a": "b"}, {"helm.sh/resource-policy": "keep"}, {"router": 48, "worker": 64})
KEY = Key(SECRETS, "serving", WANTED.name)


@pytest.fixture
def api() -> Iterator[RunningApi]:
    with running_api() as running:
        running.store.create(Key(Resource("", "namespaces"), "", "serving"), named("v1", "Namespace", "serving"))
        yield running


def named(version: str, kind: str, name: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def access(api: RunningApi, user: str = "") -> ApiAccess:
    return access_from({"KUBECONFIG": str(api.kubeconfig(user) if user else api.kubeconfig())})


def values(found: Object) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in found["data"].items()}


def test_what_is_absent_is_created_and_what_is_there_stays(api: RunningApi) -> None:
    assert ensure(WANTED, "serving", access(api)) == "created"
    created = api.store.get(KEY)
    assert {name: len(value) for name, value in values(created).items()} == WANTED.keys
    assert len(set(values(created).values())) == 2
    assert all(value.isalnum() and value.isascii() for value in values(created).values())
    assert created["metadata"]["labels"] == WANTED.labels
    assert created["metadata"]["annotations"] == WANTED.annotations
    assert ensure(WANTED, "serving", access(api)) == "kept"
    assert api.store.get(KEY) == created


def test_a_key_that_is_new_is_added_to_a_secret_of_an_older_chart(api: RunningApi) -> None:
    """Which helm would delete without the annotation."""
    older = {**named("v1", "Secret", WANTED.name), "data": {"router": "b25l"}}
    older["metadata"]["namespace"] = "serving"
    api.store.create(KEY, older)
    assert ensure(WANTED, "serving", access(api)) == "kept, with new values of worker"
    found = api.store.get(KEY)
    assert (values(found)["router"], len(values(found)["worker"])) == ("one", 64)
    assert found["metadata"]["annotations"] == WANTED.annotations
    one = dataclasses.replace(WANTED, keys={"router": 48}, annotations={"note": "x"})
    assert ensure(one, "serving", access(api)) == "kept"
    assert api.store.get(KEY)["metadata"]["annotations"] == {**WANTED.annotations, "note": "x"}


def test_who_may_not_is_told_so(api: RunningApi) -> None:
    with pytest.raises(Refused, match="orbidden"):
        ensure(WANTED, "serving", access(api, "system:serviceaccount:a:b"))


def test_somebody_who_was_faster_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes | Refused] = [
        Refused(404, "absent"),
        Refused(409, "there"),
        json.dumps(
            {"metadata": {"annotations": {**WANTED.annotations}}, "data": {"router": "", "worker": ""}}
        ).encode(),
    ]

    def answer(*_: object, **__: object) -> bytes:
        found = answers.pop(0)
        if isinstance(found, Refused):
            raise found
        return found

    monkeypatch.setattr(release_secrets, "call", answer)
    assert ensure(WANTED, "serving", ApiAccess("", "")) == "kept"
    answers += [Refused(404, "absent"), Refused(422, "invalid")]
    with pytest.raises(Refused, match="invalid"):
        ensure(WANTED, "serving", ApiAccess("", ""))


def test_the_command_says_what_it_has_done_or_the_way_without_it(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig()))
    monkeypatch.setattr("sys.argv", ["release_secrets", "serving", json.dumps(dataclasses.asdict(WANTED))])
    release_secrets.main()
    assert capsys.readouterr().out == "Secret baton-redis: created.\n"
    monkeypatch.setattr(definition, "RETRY_S", 0.0)
    monkeypatch.setattr(release_secrets, "access_from", lambda _: ApiAccess("http://127.0.0.1:1", "word"))
    monkeypatch.setattr(release_secrets, "call", refuse)
    with pytest.raises(SystemExit, match=r"cannot be created: not today.* existingSecret of clusterSecret"):
        release_secrets.main()


def refuse(*_: object, **__: object) -> bytes:
    raise BatonError("not today")
