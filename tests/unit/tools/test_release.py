"""A release: one version everywhere, images by their digests alone, and scripts that call what they should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import ConfigError
from tools.release import CHART, check, environment, read_images, versions, write

ROOT = Path(__file__).parents[3]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["release"]["steps"]
SCRIPT = "\n".join(step.get("run", "") for step in STEPS)
PUSHED = {
    name: {"repository": f"registry.example/team/baton-{name}", "digest": f"sha256:{letter * 64}"}
    for name, letter in (("router", "a"), ("worker", "b"), ("worker-cuda", "c"), ("worker-vllm", "f"))
}


def test_every_file_states_the_same_version() -> None:
    (version,) = set(versions(ROOT).values())
    assert len(versions(ROOT)) >= 7
    assert check(ROOT, f"v{version}") == version
    with pytest.raises(ConfigError, match=r"the tag is v9, and pyproject\.toml says"):
        check(ROOT, "v9")


def test_a_release_names_its_images_by_digest_in_the_chart_and_for_compose(tmp_path: Path) -> None:
    shutil.copytree(ROOT / CHART, tmp_path / CHART)
    write(tmp_path, read_images(json.dumps(PUSHED)))
    values = yaml.safe_load((tmp_path / "dist/chart/baton/values.yaml").read_text())
    before = yaml.safe_load((ROOT / CHART / "values.yaml").read_text())
    for name in ("router", "worker"):
        assert values["image"][name] == before["image"][name] | PUSHED[name] | {"tag": ""}
        values["image"][name] = before["image"][name]
    assert values == before, "nothing else is changed"
    lines = (tmp_path / "dist/release.env").read_text().splitlines()
    assert lines[0] == f"BATON_ROUTER_IMAGE=registry.example/team/baton-router@sha256:{'a' * 64}"
    compose = (ROOT / "deploy/docker/compose.yaml").read_text() + (ROOT / "deploy/kind/up.sh").read_text()
    assert all(f"${{{line.partition('=')[0]}:-" in compose for line in lines[:2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router": {"repository": "registry.example/x", "digest": ""}}, "is no digest"),
        ({"router": {"repository": "registry.example/x", "digest": "sha256:12"}}, "is no digest"),
        ({"router": {"repository": "baton-router", "digest": f"sha256:{'a' * 64}"}}, "is no repository"),
        ({"router": {"repository": "registry.example/x"}}, "not as it should be"),
        ({"other": PUSHED["router"]}, "a release has the images router, worker, worker-cuda, worker-vllm"),
    ],
)
def test_an_image_without_a_true_name_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_images(json.dumps(PUSHED | change))


def test_a_chart_that_names_images_in_another_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / CHART).mkdir(parents=True)
    (tmp_path / CHART / "values.yaml").write_text("image: {router: {}}\n")
    with pytest.raises(ConfigError, match="does not name the router's image"):
        write(tmp_path, read_images(json.dumps(PUSHED)))


def test_the_workflow_runs_what_is_there_and_names_nobody() -> None:
    for path in re.findall(r"(?:sh |-r |-c |helm package )((?:deploy|helm|constraints)[\w./-]*)", SCRIPT):
        assert (ROOT / path).exists(), path
    for module, command in re.findall(r"-m (tools\.release) (\w+)", SCRIPT):
        assert (module, command in {"check", "images"}) == ("tools.release", True)
    targets = re.findall(r"\bmake ([\w-]+)", SCRIPT)
    makefile = (ROOT / "Makefile").read_text()
    assert {"install", "audit"} == set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    text = (ROOT / ".github/workflows/release.yaml").read_text() + (ROOT / "deploy/docker/release.sh").read_text()
    assert "sha256:" not in text.replace(r"\(sha256:", ""), "digests are asked for"
    assert set(re.findall(r"(?:vars|secrets)\.(\w+)", text)) == (
        {"REGISTRY", "REGISTRY_USER", "REGISTRY_PASSWORD", "PYPI_URL", "PYPI_TOKEN"}
    )
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in STEPS if "uses" in step)


def test_pushing_is_for_tags_alone() -> None:
    """Each command that leaves something behind outside stands in a branch, or a step, that asks for it."""
    for step in STEPS:
        run = step.get("run", "")
        if re.search(r"\bgh release|uv publish", run):
            assert step["if"] == "env.PUSHED == 'true'"
        for word in ("helm push", "docker login"):
            if word in run:
                assert run.index('if [ "$PUSHED" = true ]; then') < run.index(word)


# -- scripts, with programs that write down how they were called -------------------------------------------------------


class Programs:
    """Stands for docker, kind and helm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, answer in {"docker": ANSWER_OF_DOCKER, "kind": "", "helm": "", "kubectl": ""}.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{answer}\n')
            path.chmod(0o755)

    def run(self, cwd: Path, *words: str, **environ: str) -> list[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        own |= {"PATH": f"{self.folder}:{os.environ['PATH']}"} | environ
        done = subprocess.run(["sh", *words], cwd=cwd, env=own, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return (self.folder / "calls").read_text().splitlines()


ANSWER_OF_DOCKER = f"""
case "$*" in *imagetools*) echo sha256:{"d" * 64};; esac
while [ $# -gt 0 ]; do
  if [ "$1" = --metadata-file ]; then printf '{{\\n  "containerimage.digest": "sha256:{"e" * 64}"\\n}}' > "$2"; fi
  shift
done
"""


def test_images_are_built_from_the_bases_digest_and_listed_by_their_own(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    script = "deploy/docker/release.sh"
    calls = Programs(tmp_path).run(tmp_path, script, "registry.example/team", "0.1.0", "3.11.11-slim-bookworm", "true")
    builds = [call for call in calls if call.startswith("docker buildx build ")]
    assert len(builds) == 4
    dockerfile = (ROOT / "deploy/docker/worker-vllm.Dockerfile").read_text()
    (vllm,) = re.findall(r"^ARG VLLM=(.+)$", dockerfile, re.MULTILINE)
    for number, build in enumerate(builds):
        base = "PYTHON=3.11.11-slim-bookworm" if number < 3 else f"VLLM={vllm}"
        assert f"--build-arg {base}@sha256:{'d' * 64} " in build
        assert build.count("@sha256:") == 1
        assert "--push --sbom=true --provenance=mode=max" in build
    assert "--tag registry.example/team/baton-worker:0.1.0-cuda" in builds[2]
    images = read_images((tmp_path / "dist/images.json").read_text())
    assert {image.digest for image in images.values()} == {f"sha256:{'e' * 64}"}
    assert "--tag registry.example/team/baton-worker:0.1.0-vllm" in builds[3]
    assert "--file deploy/docker/worker-vllm.Dockerfile" in builds[3]
    assert "BATON_CUDA_IMAGE=registry.example/team/baton-worker@" in environment(images)
    assert "BATON_VLLM_IMAGE=registry.example/team/baton-worker@" in environment(images)


def test_without_a_release_nothing_is_pushed(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    script = "deploy/docker/release.sh"
    calls = Programs(tmp_path).run(tmp_path, script, "", "0.1.0", "3.11.11-slim-bookworm", "false")
    assert not [call for call in calls if "--push" in call]
    assert not (tmp_path / "dist/images.json").exists()


@pytest.mark.parametrize("is_given", [False, True])
def test_kind_gets_the_images_that_are_built_here_or_those_of_a_release(tmp_path: Path, is_given: bool) -> None:
    router, worker = f"r.example/baton-router@sha256:{'a' * 64}", f"r.example/baton-worker@sha256:{'b' * 64}"
    given = {"BATON_ROUTER_IMAGE": router, "BATON_WORKER_IMAGE": worker} if is_given else {}
    calls = Programs(tmp_path).run(tmp_path, str(ROOT / "deploy/kind/up.sh"), **given)
    assert (f"docker pull {router}" in calls, "docker build --file deploy/docker/router.Dockerfile" in calls[0]) == (
        is_given, not is_given
    )  # fmt: skip
    assert "kind load docker-image --name baton baton-router:0.1.0 baton-worker:0.1.0" in calls
    (install,) = (call for call in calls if call.startswith("helm upgrade --install baton helm/baton "))
    assert (ROOT / install.split("--values ")[1].split()[0]).is_file()


def test_the_dev_container_has_the_images_python_and_the_locks_packages() -> None:
    found = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    dockerfile = (ROOT / ".devcontainer/Dockerfile").read_text()
    (python,) = re.findall(r"^ARG PYTHON=(.+)$", dockerfile, re.MULTILINE)
    assert f"ARG PYTHON={python}\n" in (ROOT / "deploy/docker/router.Dockerfile").read_text()
    assert found["build"]["args"]["PYTHON"] == f"${{localEnv:BATON_PYTHON:{python}}}"
    assert found["postCreateCommand"] == "make install"
    assert f"useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash {found['remoteUser']}" in dockerfile
    assert {python} == set(re.findall(r"PYTHON_TAG: (\S+)", (ROOT / ".github/workflows/release.yaml").read_text()))
