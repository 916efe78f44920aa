"""What a release is made of: one version everywhere, and images by their digests.

    python -m tools.release check v0.1.0                 fails where a file says another version
    python -m tools.release images IMAGES.json           writes the chart and dist/release.env with these images

IMAGES.json lists what the release workflow has pushed, `{"router": {"repository": ..., "digest": "sha256:..."}, ...}`,
under the names router, worker, worker-cuda and worker-vllm. No digest is made up: without one nothing is written.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton.errors import ConfigError

CHART = Path("helm/baton")
DIST = Path("dist")
NAMES = ("router", "worker", "worker-cuda", "worker-vllm")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)+")
IMAGE_OF_VALUES = r"(^  {name}:.*\n    repository: )\S*(\n    tag: ).*(\n    digest: ).*$"
"""The lines of an image in the chart's values.yaml, whose comments and order stay."""


@dataclass(frozen=True, slots=True)
class PushedImage:
    """An image in a registry. Raises ConfigError: it is named in another way than by repository and digest."""

    repository: str
    digest: str

    def __post_init__(self) -> None:
        if not REPOSITORY.fullmatch(self.repository):
            raise ConfigError(
                f"{self.repository!r} is no repository of images, such as registry.example/team/baton-router"
            )
        if not DIGEST.fullmatch(self.digest):
            raise ConfigError(f"{self.digest!r} is no digest (sha256: and 64 hexadecimal digits)")

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


def versions(root: Path) -> dict[str, str]:
    """The version that each file states, by the file's name."""
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text())
    found = {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"],
        "Chart.yaml, version": chart["version"],
        "Chart.yaml, appVersion": chart["appVersion"],
    }
    for path in sorted((root / "deploy" / "docker").glob("*.Dockerfile")):
        (found[path.name],) = re.findall(r"^ARG VERSION=(.+)$", path.read_text(), re.MULTILINE)
    compose = (root / "deploy" / "docker" / "compose.yaml").read_text()
    for number, version in enumerate(re.findall(r":-baton-\w+:([^}\s]+)\}", compose)):
        found[f"compose.yaml, image {number + 1}"] = version
    return found


def check(root: Path, tag: str) -> str:
    """The version of which the tag is (v0.1.0 of 0.1.0). Raises ConfigError: a file states another one."""
    version = tag.removeprefix("v")
    if wrong := {name: found for name, found in versions(root).items() if found != version}:
        raise ConfigError(f"the tag is {tag}, and {', '.join(f'{name} says {found}' for name, found in wrong.items())}")
    return version


def read_images(text: str) -> dict[str, PushedImage]:
    """The images of a release. Raises ConfigError: one is missing, unknown, or not named by its digest."""
    try:
        given: Mapping[str, Any] = json.loads(text)
        images = {name: PushedImage(str(each["repository"]), str(each["digest"])) for name, each in given.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the list of images is not as it should be: {error!r}") from None
    if set(images) != set(NAMES):
        raise ConfigError(f"a release has the images {', '.join(NAMES)}; these are given: {', '.join(sorted(images))}")
    return images


def chart_values(values: str, images: Mapping[str, PushedImage]) -> str:
    """The text of the chart's values.yaml with the images of a release. Raises ConfigError: it names none."""
    for name in ("router", "worker"):
        image = images[name]
        values, number = re.subn(
            IMAGE_OF_VALUES.format(name=name),
            rf'\g<1>{image.repository}\g<2>""\g<3>{image.digest}',
            values,
            flags=re.MULTILINE,
        )
        if number != 1:
            raise ConfigError(f"values.yaml does not name the {name}'s image by repository, tag and digest")
    return values


def environment(images: Mapping[str, PushedImage]) -> str:
    """The variables by which compose and the kind script take the images of a release."""
    names = {
        "router": "BATON_ROUTER_IMAGE",
        "worker": "BATON_WORKER_IMAGE",
        "worker-cuda": "BATON_CUDA_IMAGE",
        "worker-vllm": "BATON_VLLM_IMAGE",
    }
    return "".join(f"{variable}={images[name]}\n" for name, variable in names.items())


def write(root: Path, images: Mapping[str, PushedImage]) -> None:
    """Writes dist/chart/baton, from which helm makes the package, and dist/release.env."""
    chart = root / DIST / "chart" / "baton"
    shutil.rmtree(chart, ignore_errors=True)
    shutil.copytree(root / CHART, chart)
    (chart / "values.yaml").write_text(chart_values((chart / "values.yaml").read_text(), images))
    (root / DIST / "release.env").write_text(environment(images))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("tag")
    commands.add_parser("images").add_argument("file", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "check":
            print(check(Path(), arguments.tag))
        else:
            write(Path(), read_images(arguments.file.read_text()))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
