"""Both Redis servers as the chart starts them, with real ones: who gets in, and what each may do."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from deploy.doctor import redis as doctor
from deploy.embedded_redis import valkey_binary
from kvstore.index.keys import Keys
from tests.contract import redis7
from tests.helm.chart import MATRIX, Object, Values, every_values, of_kind, pod_of, pods, render, the
from tests.helm.test_config import environment
from tests.support.waiting import wait_until

KEYS = Keys("0123456789abcdef" * 2)
USERS = ("router", "worker", "controller", "doctor")
EVERYBODY_S_NOT = (
    ("FLUSHALL",), ("FLUSHDB",), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("DEBUG", "JMAP"),
    ("KEYS", "*"), ("ACL", "LIST"), ("ACL", "SETUSER", "x", "on"), ("SHUTDOWN",), ("MONITOR",), ("SAVE",),
    ("SCRIPT", "FLUSH"), ("FUNCTION", "LIST"), ("MODULE", "LIST"), ("REPLICAOF", "NO", "ONE"), ("CLIENT", "LIST"),
    ("SWAPDB", "0", "1"), ("MIGRATE", "h", "1", "k", "0", "1"), ("GET", "foreign"), ("SET", "foreign", "x"),
)  # fmt: skip
RECORD = KEYS.record("acme", "r", b"d" * 16)
NOT = {
    "worker": (
        ("HGETALL", RECORD), ("GET", KEYS.account("acme")), ("SET", KEYS.router("r"), "{}"),
        ("SET", KEYS.controller, "{}"), ("HSET", KEYS.desired, "decode", "0"), ("SCAN", "0"),
        ("GET", KEYS.usage("acme", "r")), ("EVAL", "return redis.call('GET', KEYS[1])", "1", KEYS.account("acme")),
    ),
    "router": (
        ("HSET", KEYS.lease("w"), "epoch", "1"), ("UNLINK", KEYS.lease("w")), ("SADD", KEYS.workers, "w"),
        ("XADD", KEYS.events, "*", "k", "v"), ("SET", KEYS.seq("w", 1), "1"), ("SADD", KEYS.blocks("w", 1), "k"),
        ("SET", KEYS.controller, "{}"), ("HSET", KEYS.desired, "decode", "0"), ("SCAN", "0"),
        ("EVAL", "return redis.call('HSET', KEYS[1], 'epoch', 1)", "1", KEYS.lease("w")),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ),
    "controller": (
        ("HSET", KEYS.lease("w"), "epoch", "1"), ("XADD", KEYS.events, "*", "k", "v"), ("SET", KEYS.router("r"), "{}"),
        ("HGETALL", RECORD), ("GET", KEYS.account("acme")), ("SCAN", "0"),
    ),
    "doctor": (
        ("SADD", KEYS.workers, "w"), ("HSET", KEYS.lease("w"), "epoch", "1"), ("HGETALL", RECORD),
        ("GET", KEYS.boot), ("EVAL", "return 1", "0"), ("SCAN", "0"),
    ),
}  # fmt: skip


REFUSALS = r"[Nn]o permissions|can't run|not allowed|ACL"


def written(objects: tuple[Object, ...], pod: Object, folder: Path) -> dict[str, Path]:
    """mountPath -> a folder with what the kubelet would put there."""
    volumes, (container,) = {volume["name"]: volume for volume in pod["volumes"]}, pod["containers"]
    found = {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        place = found[mount["mountPath"]] = folder / mount["name"]
        place.mkdir(exist_ok=True)
        if "configMap" in volume:
            for name, text in the(objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
                (place / name).write_text(text)
        elif "secret" in volume:
            data = the(objects, "Secret", volume["secret"]["secretName"])["data"]
            items = volume["secret"].get("items") or [{"key": key, "path": key} for key in data]
            for item in items:
                (place / item["path"]).write_bytes(base64.b64decode(data[item["key"]]))
    return found


def command(
    objects: tuple[Object, ...], component: str, folder: Path, port: int, binary: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """The container's command and its environment, for this machine: its paths, a free port of the loopback, the server
    that there is.
    """
    pod = pod_of(objects, component).spec
    (container,) = pod["containers"]
    mounts = written(objects, pod, folder)
    paths = re.compile("|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True)))

    def here(text: str) -> str:
        return paths.sub(lambda found: str(mounts[found[0]]), text)

    there = {"redis-server": str(binary or valkey_binary()), "6379": str(port), "*": "127.0.0.1", "-::*": "-::1"}
    words = [here(word) for word in container["command"]]
    env = {each["name"]: here(each["value"]) for each in container.get("env", ())}
    return [there.get(word, word) for word in words], os.environ | env


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def server(
    objects: tuple[Object, ...], component: str, folder: Path, binary: Path | None = None, **environ: str
) -> Generator[int]:
    """The server, as the chart's pod starts it. Yields its port."""
    port = free_port()
    words, env = command(objects, component, folder, port, binary)
    process = subprocess.Popen(words, env=env | environ, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(port), 60)
        yield port
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def objects() -> tuple[Object, ...]:
    """Drawn once: passwords differ from one rendering to the next."""
    return render(MATRIX["defaults"])


@pytest.fixture(scope="module")
def port(objects: tuple[Object, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with server(objects, "redis", tmp_path_factory.mktemp("redis")) as port:
        yield port


def url(objects: tuple[Object, ...], user: str, port: int) -> str:
    """What a process of that part has in its environment, with the server's address on this machine."""
    component = {"worker": "decode", "doctor": "test"}.get(user, user)
    pod = next(pod for pod in pods(objects) if pod.component == component)
    url = environment(objects, pod.spec["containers"][-1])["BATON_INDEX_REDIS_URL"]
    parts = urlsplit(url)
    assert (parts.hostname, parts.port, parts.username) == ("baton-redis.serving.svc", 6379, user)
    return f"redis://{user}:{parts.password}@127.0.0.1:{port}/0"


@pytest.mark.parametrize("user", USERS)
def test_each_part_gets_in_and_does_nothing_that_is_another_s(
    objects: tuple[Object, ...], port: int, user: str
) -> None:
    """The contract suites show that each may do what it does; here is what it may not."""
    with Redis.from_url(url(objects, user, port), protocol=2) as redis:
        assert redis.ping()
        for forbidden in (*EVERYBODY_S_NOT, *NOT[user]):
            with pytest.raises(
                (NoPermissionError, ResponseError), match=r"[Nn]o permissions|can't run|not allowed|ACL"
            ):
                redis.execute_command(*forbidden)


def test_nobody_gets_in_without_a_password_or_with_another_s(objects: tuple[Object, ...], port: int) -> None:
    passwords = {user: urlsplit(url(objects, user, port)).password for user in USERS}
    assert len(set(passwords.values())) == len(USERS)
    wrong = ["", ":word@", "default:@", f"router:{passwords['worker']}@", f":{passwords['router']}@"]
    for who in wrong:
        with (
            Redis.from_url(f"redis://{who}127.0.0.1:{port}/0", protocol=2) as redis,
            pytest.raises((AuthenticationError, ResponseError)),
        ):
            redis.ping()


def test_the_doctor_looks_at_the_server_for_every_part(objects: tuple[Object, ...], port: int) -> None:
    for user in USERS:
        facts = doctor.look(url(objects, user, port))
        checks = {check.name: check.state for check in doctor.server("redis://", facts)}
        assert checks["redis eviction"] == checks["redis persistence"] == "ok"


def test_ray_s_store_is_for_its_head_alone(objects: tuple[Object, ...], tmp_path: Path) -> None:
    (ray,) = pod_of(objects, "head").spec["containers"]
    password = environment(objects, ray)["RAY_STORE_PASSWORD"]
    assert "--redis-password=$(RAY_STORE_PASSWORD)" in ray["command"]
    with server(objects, "ray-store", tmp_path) as port:
        with Redis(port=port, password=password, protocol=2) as redis:
            assert redis.execute_command("HSET", "RAYbaton@KV", "a", "b") == 1
            assert redis.execute_command("DEL", "DUMMY") == 0
            for forbidden in (("SET", "x", "y"), ("HGETALL", "RAYbaton@KV"), ("EVAL", "return 1", "0"), ("FLUSHALL",)):
                with pytest.raises(NoPermissionError):
                    redis.execute_command(*forbidden)
        with Redis(port=port, protocol=2) as redis, pytest.raises(AuthenticationError):
            redis.ping()
    assert (tmp_path / "data" / "appendonlydir").is_dir(), "what it keeps outlives it"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("worker", None, "no password for user worker"),
        ("router", "", "user router is empty"),
        ("router", "\n", "user router is empty"),
        ("doctor", "a word", "user doctor is empty, or has other characters"),
        ("doctor", "p@ss", "user doctor is empty, or has other characters"),
    ],
)
def test_without_a_good_password_for_every_user_nothing_starts(
    objects: tuple[Object, ...], tmp_path: Path, name: str, text: str | None, why: str
) -> None:
    words, _ = command(objects, "redis", tmp_path, free_port())
    file = tmp_path / "passwords" / name
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert why in done.stderr


@every_values
def test_no_secret_is_in_an_argument_or_a_configmap(values: Values) -> None:
    objects = render(values)
    secrets = {
        base64.b64decode(value).decode().strip()
        for each in of_kind(objects, "Secret")
        if not each["metadata"]["name"].endswith("-tenants")
        for value in each["data"].values()
    }
    text = json.dumps([each for each in objects if each["kind"] != "Secret"])
    assert not [secret for secret in secrets if secret in text or base64.b64encode(secret.encode()).decode() in text]
    for pod in pods(objects):
        for container in pod.containers:
            assert "--protected-mode" not in container.get("command", [])


PERSISTENT = Values(sets=("redis.persistence.enabled=true",))


def test_accounts_outlive_the_server_and_nothing_else_does(tmp_path: Path) -> None:
    """Leases and the index of before lack what was written last: they go with the boot token, and all begin anew."""
    objects = render(PERSISTENT)
    binary, path = redis7.binary(), f"{redis7.client().parent}:{os.environ['PATH']}"
    kept = {KEYS.account("acme"), KEYS.usage("acme", "r"), KEYS.adapters, KEYS.history(1), KEYS.held}
    of_router = (*kept, KEYS.boot, RECORD, KEYS.router("r"))
    of_worker = (KEYS.lease("w"), KEYS.workers, KEYS.events, KEYS.blocks("w", 1), KEYS.seq("w", 1))

    def clients(port: int) -> Iterator[Redis]:
        for user in ("router", "worker", "controller"):
            with Redis.from_url(url(objects, user, port), protocol=2, decode_responses=True) as redis:
                yield redis

    with server(objects, "redis", tmp_path, binary, PATH=path) as port:
        router, worker, controller = clients(port)
        for redis, keys in ((router, of_router), (worker, of_worker), (controller, (KEYS.desired,))):
            for key in keys:
                redis.set(key, "x")
                assert redis.exists(key)
        router.pexpire(KEYS.account("acme"), 3_600_000)
        # Redis notes what a script has written as one transaction.
        script = "redis.call('SET', KEYS[1], 'y') redis.call('SET', KEYS[2], 'z')"
        router.eval(script, 2, KEYS.account("one"), KEYS.account("two"))
    for _ in range(2):
        with server(objects, "redis", tmp_path, binary, PATH=path) as port:
            router, worker, controller = clients(port)
            assert {key for key in of_router if router.exists(key)} == kept
            found = [router.get(KEYS.account(tenant)) for tenant in ("acme", "one", "two")]
            assert found == ["x", "y", "z"]
            assert not worker.exists(*of_worker)
            assert not controller.exists(KEYS.desired)
            with Redis(port=port, protocol=2) as stranger, pytest.raises((AuthenticationError, ResponseError)):
                stranger.ping()


def test_a_file_that_the_server_cannot_read_is_said(tmp_path: Path) -> None:
    objects = render(PERSISTENT)
    binary, path = redis7.binary(), f"{redis7.client().parent}:{os.environ['PATH']}"
    words, env = command(objects, "redis", tmp_path, free_port(), binary)
    broken = tmp_path / "data" / "appendonlydir"
    broken.mkdir()
    (broken / "appendonly.aof.manifest").write_text("nonsense\n")
    done = subprocess.run(
        words, env=env | {"PATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "the server does not read what is in" in done.stderr


def test_the_volume_of_accounts_is_a_claim_that_stays() -> None:
    objects = render(PERSISTENT)
    claim = the(objects, "PersistentVolumeClaim", "baton-redis")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "8Gi"
    own = render(Values(sets=(*PERSISTENT.sets, "redis.persistence.existingClaim=mine")))
    assert not of_kind(own, "PersistentVolumeClaim")
    for found, name in ((objects, "baton-redis"), (own, "mine")):
        pod = pod_of(found, "redis")
        (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "data")
        assert volume["persistentVolumeClaim"] == {"claimName": name}
        words = pod.spec["containers"][0]["command"]
        assert words[words.index("--appendonly") + 1] == "yes"
        assert words[words.index("--dir") + 1] == "/data"
        assert "--maxmemory" in words
    plain = pod_of(render(), "redis").spec["containers"][0]["command"]
    assert plain[plain.index("--appendonly") + 1] == "no"
