"""Builds both images and tries them: `make images`, with docker or buildah.

The router's image answers /readyz, and a worker of the worker's image computes one prompt, on this machine's loopback
addresses. Redis is the one of `baton up`, since neither image has one.

    make images IMAGES="--builder buildah --base localhost/python:3.11.7 --find-links /opt/wheels"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.embedded_redis import EmbeddedRedis
from deploy.ray_pools.lean_node import free_ports

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "docker"
USER = 1000
"""User and group of the images."""
INNER = {"cache": "/var/cache/baton", "state": "/var/lib/baton", "ray": "/tmp/ray"}
"""Folders of the containers that the trial shares among them."""
READY_S, STOP_S = 600.0, 20.0
DRAW_SECRET = f"umask 077 && head -c 32 /dev/urandom | base64 > {INNER['state']}/secret"
"""Command that writes the cluster's secret as the images' user: nobody else may read it."""
PROMPT = "The capital of France is"


class Failed(Exception):
    """An image could not be built, or did not do what it is for."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Sources of the images' contents; empty: those that the Dockerfiles name."""

    base: str = ""
    """Base image with Python, as NAME:TAG."""
    index: str = ""
    """Mirror of PyPI."""
    torch_index: str = ""
    """Page below which torch's own indexes are."""
    find_links: str = ""
    """Folder with wheels: with buildah, one of this machine."""

    @property
    def arguments(self) -> Iterator[str]:
        """The build arguments. They name all stages: older versions of buildah do not see defaults in FROM."""
        image, _, tag = self.base.rpartition(":")
        given = {
            "VARIANT": "cpu",
            "CUDA": "cu130",
            "PYTHON_IMAGE": image,
            "PYTHON": tag,
            "PIP_INDEX_URL": self.index,
            "PIP_FIND_LINKS": self.find_links,
            "TORCH_INDEX": self.torch_index,
        }
        for name, value in given.items():
            if value:
                yield f"--build-arg={name}={value}"


class Builder:
    """Docker or buildah."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def _is_buildah(self) -> bool:
        return self.name == "buildah"

    def build(self, name: str, tag: str, sources: Sources) -> None:
        """Build one image from this checkout."""
        command = ["docker", "build"]
        if self._is_buildah:
            command = ["buildah", "bud", "--isolation=chroot", "--layers"]
            if sources.find_links and Path(sources.find_links).is_dir():
                command.append(f"--volume={sources.find_links}:{sources.find_links}:ro")
        dockerfile = FOLDER / f"{name.removeprefix('baton-')}.Dockerfile"
        arguments = [argument for argument in sources.arguments if "VARIANT" not in argument or name == "baton-worker"]
        run([*command, f"--file={dockerfile}", f"--tag={name}:{tag}", *arguments, str(ROOT)])

    @contextlib.contextmanager
    def container(
        self, image: str, command: Sequence[str], environment: Mapping[str, str], folders: Mapping[str, Path]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Context manager: a running container, on this machine's network and as the image's user."""
        volumes = [f"--volume={path}:{INNER[name]}" for name, path in folders.items()]
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        with contextlib.ExitStack() as stack:
            if self._is_buildah:
                made = output(["buildah", "from", "--pull-never", image])
                stack.callback(output, ["buildah", "rm", made])
                started = ["buildah", "run", "--isolation=chroot", f"--user={USER}:{USER}", *volumes, *variables, made]
                started += ["--"]
            else:
                made = f"baton-trial-{os.getpid()}-{time.monotonic_ns()}"
                started = ["docker", "run", "--rm", f"--name={made}", "--network=host", "--ipc=host", *volumes]
                started += [*variables, image]
            process = subprocess.Popen([*started, *command], start_new_session=True)
            stack.callback(self._end, process, made)
            yield process

    def _end(self, process: subprocess.Popen[bytes], name: str) -> None:
        if not self._is_buildah:
            subprocess.run(["docker", "stop", "--time=5", name], capture_output=True, check=False)
        for number in (15, 9):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_S)
                return


def chosen_builder() -> str:
    """Return docker if its daemon answers, else buildah.

    Raises:
        Failed: there is neither.
    """
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        return "docker"
    if shutil.which("buildah"):
        return "buildah"
    raise Failed("neither docker, with a daemon that answers, nor buildah is there: install one of them")


def try_images(builder: Builder, tag: str) -> str:
    """Serve with the images, and return the text that a worker's prompt got.

    Raises:
        Failed: a container ended, or the cluster did not become ready in time.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-images-")))
        folder.chmod(0o755)
        shared = {name: folder / name for name in INNER}
        for path in shared.values():
            path.mkdir(mode=0o777)
            path.chmod(0o777)
        redis, ray, client, grpc, http, control = free_ports(6)
        server = EmbeddedRedis(port=redis)
        server.start()
        stack.callback(server.stop)
        environment = {
            "BATON_INDEX_REDIS_URL": server.url,
            "BATON_CLUSTER_NAME": "images",
            "BATON_CLUSTER_PREFILL": "0",
            "BATON_CLUSTER_DECODE": "1",
            "BATON_CLUSTER_HOST": "127.0.0.1",
            "BATON_CLUSTER_SECRET": f"{INNER['state']}/secret",
            "BATON_CLUSTER_RAY_ADDRESS": f"127.0.0.1:{ray}",
            "BATON_CLUSTER_STATE_FILE": f"{INNER['state']}/state.json",
            "BATON_CLUSTER_CONTROLLER_PORT": str(control),
            "BATON_GRPC_PORT": str(grpc),
            "BATON_HTTP_PORT": str(http),
            "BATON_ENGINE_KV_CACHE_GIB": "0.25",
            "BATON_ROUTER_CACHE_SECRET": secrets.token_hex(16),
        }
        without_ray = {name: path for name, path in shared.items() if name != "ray"}
        worker, router = f"baton-worker:{tag}", f"baton-router:{tag}"
        for command in (["sh", "-c", DRAW_SECRET], ["baton", "run", "model"]):
            with builder.container(router, command, environment, without_ray) as got:
                if got.wait(timeout=READY_S):
                    raise Failed(f"in the router's image {command[-1]!r} ended with status {got.returncode}")
        head = [
            *("ray", "start", "--head", "--block", f"--port={ray}", "--node-ip-address=127.0.0.1", "--num-cpus=0"),
            *("--include-dashboard=false", "--object-store-memory=80000000", "--disable-usage-stats"),
            f"--ray-client-server-port={client}",
            '--resources={"baton_worker":1}',
        ]
        running = [
            stack.enter_context(builder.container(image, command, environment, folders))
            for image, command, folders in (
                (worker, head, shared),
                (worker, ["baton", "run", "controller"], shared),
                (router, ["baton", "run", "router"], without_ray),
            )
        ]
        wait_ready(f"http://127.0.0.1:{http}/readyz", running)
        return completed(f"http://127.0.0.1:{http}/v1/completions")


def wait_ready(url: str, running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the router is ready, which it is once a worker is.

    Raises:
        Failed: a container ended, or it takes too long.
    """
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        if any(each.poll() is not None for each in running):
            raise Failed("a container has ended before the router was ready; its output is above")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(1.0)
    raise Failed(f"the router is not ready after {READY_S:.0f} s")


def completed(url: str) -> str:
    """Return the text with which the model continues the prompt."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        raise Failed(f"the prompt failed: {error.read().decode(errors='replace')}") from error
    text: str = found["choices"][0]["text"]
    if not text:
        raise Failed(f"the prompt got no text: {found}")
    return text


def run(command: Sequence[str]) -> None:
    """Run a command whose output is this program's.

    Raises:
        Failed: its status is not 0.
    """
    if status := subprocess.run(command, check=False).returncode:
        raise Failed(f"{' '.join(command[:3])} ... ended with status {status}")


def output(command: Sequence[str]) -> str:
    """Return what a command writes."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(command[:3])}: {done.stderr.strip()}")
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and try the images; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__.splitlines()[0])
    parser.add_argument("--builder", choices=("docker", "buildah"), help="by default docker if its daemon answers")
    parser.add_argument("--base", default="", help="base image with Python 3.11.3 or newer in /usr/local, as NAME:TAG")
    parser.add_argument("--index", default="", help="mirror of PyPI")
    parser.add_argument("--torch-index", default="", help="page below which torch's own indexes are")
    parser.add_argument("--find-links", default="", help="folder (with buildah) or page with wheels that no index has")
    parser.add_argument("--no-build", action="store_true", help="only try images that are there")
    parser.add_argument("--no-trial", action="store_true", help="only build")
    asked = parser.parse_args(arguments)
    tag: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sources = Sources(base=asked.base, index=asked.index, torch_index=asked.torch_index, find_links=asked.find_links)
    try:
        builder = Builder(asked.builder or chosen_builder())
        for name in () if asked.no_build else ("baton-router", "baton-worker"):
            builder.build(name, tag, sources)
        if not asked.no_trial:
            print(f"==> {PROMPT}{try_images(builder, tag)}")
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
