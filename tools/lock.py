"""Writes which exact versions are installed: `make lock`, and `make lock UPGRADE=1` to take newer ones.

    pyproject.toml ──ranges──> uv, which asks the package index ──versions, files, hashes──> deploy/docker/locks/

    router.txt         the router's image
    worker.txt         the worker's image, without torch
    torch-cpu.txt      torch's CPU build, from PyTorch's index
    torch-cu130.txt    torch with CUDA 13 and NVIDIA's libraries, as PyPI has them
    torch-cu*.txt      torch for an older CUDA, from PyTorch's index
    build.txt          what makes our own wheel

                                                          ──versions──> constraints.txt

    everything that `make install` may install, with the extras for tests; of a package in an image the same version

A version that the locks hold stays as long as the range in pyproject.toml allows it.

The images install these with `--require-hashes --no-deps`: whatever is not in a lock, or is another file than the one
that was locked, ends the build. No lock names an index, so pip takes the files from its own, or from a mirror.
constraints.txt names no files: pip would then refuse our own source, and a CPU build of torch from another index.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import Requirement

from baton.errors import ConfigError

FOLDER = Path("deploy/docker/locks")
CONSTRAINTS = Path("constraints.txt")
PYTHON = "3.11.11"
PLATFORMS = ("x86_64-manylinux_2_36", "aarch64-manylinux_2_36")
"""Processors, and the C library of the images' base, python:3.11.11-slim-bookworm."""
IMAGES: dict[str, tuple[str, ...]] = {
    "router": ("local:gguf", "worker:huggingface-hub", "worker:numpy", "worker:safetensors"),
    "worker": ("worker", "local:gguf", "local:lightkube", "local:ray"),
}
"""Extras, or single packages of them, that an image has besides the distribution's own requirements."""
INSTALLED = ("worker", "local", "plot", "dev")
"""Extras whose packages constraints.txt holds."""
CUDA_OF_PYPI = "cu130"
TORCH_INDEX = "https://download.pytorch.org/whl"
VARIANTS = ("cpu", "cu126", "cu129")
"""Builds of torch that PyTorch's own index alone has."""
_OF_TORCHS_INDEX = {f"torch-{variant}" for variant in VARIANTS}
OF_TORCH = re.compile(r"torch|triton|cuda-.*|nvidia-.*")
"""Packages that the worker's image gets with torch, since its CPU variant has none of them but torch."""
UNKNOWN = "# Its files' hashes are not known: PyTorch's index could not be asked. `make lock` writes them where it can."
WHAT = {
    "router": "The router's image",
    "worker": "The worker's image, without torch",
    "build": "What makes our own wheel",
    f"torch-{CUDA_OF_PYPI}": "Torch with CUDA and its libraries, of PyPI",
}


OF_CONSTRAINTS = "What `make install` takes of what pyproject.toml allows, and what the tests have run with."


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """A package at one version, and the SHA-256 of each of its files that an image may take, in hexadecimal."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def public(self) -> str:
        """The version without the name of a build: 2.13.0 of 2.13.0+cpu."""
        return self.version.partition("+")[0]

    def __str__(self) -> str:
        return " \\\n".join((f"{self.name}=={self.version}", *(f"    --hash=sha256:{each}" for each in self.hashes)))


def requirements(pyproject: str, wanted: Collection[str]) -> list[str]:
    """The requirements of the distribution, and of the extras.

    Args:
        pyproject: text of pyproject.toml.
        wanted: extras (EXTRA), or packages of one (EXTRA:PACKAGE).

    Raises:
        KeyError: there is no such extra, or no such package in it.
    """
    project = tomllib.loads(pyproject)["project"]
    lines: list[str] = list(project["dependencies"])
    for item in wanted:
        extra, _, package = item.partition(":")
        named = {Requirement(line).name: line for line in project["optional-dependencies"][extra]}
        lines += [named[package]] if package else named.values()
    return lines


def still_allowed(held: Iterable[LockedPackage], pyproject: str) -> list[LockedPackage]:
    """The packages that locks hold, without those whose version the ranges in pyproject.toml exclude by now."""
    ranges: dict[str, list[Requirement]] = {}
    for each in map(Requirement, requirements(pyproject, INSTALLED)):
        ranges.setdefault(each.name.lower(), []).append(each)
    return [
        pin for pin in held if all(each.specifier.contains(pin.version) for each in ranges.get(pin.name.lower(), ()))
    ]


def locked(pylock: str) -> list[LockedPackage]:
    """The packages of a pylock.toml (PEP 751), in its order."""
    found = []
    for package in tomllib.loads(pylock).get("packages", []):
        hashes = {unquote(wheel["url"]): wheel["hashes"]["sha256"] for wheel in package["wheels"]}
        found.append(LockedPackage(package["name"], package["version"], tuple(sorted(hashes.values()))))
    return found


def read(text: str) -> list[LockedPackage]:
    """The packages of a lock that `written` made."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        name, _, version = line.split()[0].partition("==")
        found.append(LockedPackage(name, version, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))))
    return found


def written(what: str, pins: Sequence[LockedPackage]) -> str:
    """The lock's text. A package without hashes is named as such; pip then refuses the whole file."""
    lines = [f"# Written by `make lock`. {what}, for CPython {PYTHON} on {' and '.join(PLATFORMS)}."]
    lines += [UNKNOWN] if not all(pin.hashes for pin in pins) else []
    return "\n".join((*lines, *map(str, pins))) + "\n"


def merged(platforms: Sequence[Sequence[LockedPackage]]) -> list[LockedPackage]:
    """The packages with the files of all platforms. Raises ConfigError: they differ in packages or versions."""
    first, *others = ([(pin.name, pin.version) for pin in pins] for pins in platforms)
    for other in others:
        if other != first:
            raise ConfigError(f"{', '.join(PLATFORMS)} need different packages: {set(first) ^ set(other)}")
    return [
        LockedPackage(pins[0].name, pins[0].version, tuple(sorted({each for pin in pins for each in pin.hashes})))
        for pins in zip(*platforms, strict=True)
    ]


def torch_kept(pin: LockedPackage, old: Sequence[LockedPackage]) -> LockedPackage:
    """The pin with the hashes that the old lock has for this version; without any where it is of another."""
    return next((each for each in old if (each.name, each.version) == (pin.name, pin.version)), pin)


class Resolver:
    """Asks the package index through uv, which reads no settings of pip: local folders of wheels are not asked."""

    def __init__(self, uv: Path) -> None:
        self._uv = uv

    def pins(
        self, wanted: Sequence[str], held: Sequence[LockedPackage] = (), *options: str, on: Sequence[str] = PLATFORMS
    ) -> list[LockedPackage]:
        """The wanted requirements and all that they require in turn.

        Args:
            wanted: requirements, as in pyproject.toml.
            held: packages that have this version, if they are taken at all.
            options: more of uv's options.
            on: the platforms whose files are looked for.

        Raises:
            ConfigError: with uv's own words.
        """
        with tempfile.NamedTemporaryFile("w", prefix="baton-lock-", suffix=".txt") as file:
            file.write("".join(f"{name}\n" for name in sorted({f"{pin.name}=={pin.public}" for pin in held})))
            file.flush()
            options = (*options, f"--constraints={file.name}")
            try:
                return merged([self._pins(wanted, f"--python-platform={platform}", *options) for platform in on])
            except ConfigError as error:
                if not held:
                    raise
                raise ConfigError(f"{error}; `make lock UPGRADE=1` keeps no version that was locked") from None

    def _pins(self, wanted: Sequence[str], *options: str) -> list[LockedPackage]:
        command = [str(self._uv), "pip", "compile", "--no-config", "--format=pylock.toml", "--only-binary=:all:"]
        command += [f"--python-version={PYTHON}", "--no-header", "--quiet", *options, "-"]
        done = subprocess.run(command, input="\n".join(wanted), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"uv cannot lock {wanted[0]} and {len(wanted) - 1} more: {' '.join(done.stderr.split())}")
        return locked(done.stdout)


def lock(
    pyproject: str, resolver: Resolver, folder: Path, held: Sequence[LockedPackage] = ()
) -> dict[str, list[LockedPackage]]:
    """What each lock holds, by its name.

    Where PyTorch's index cannot be asked, its locks stay as they are in the folder, if they are of this version.

    Args:
        pyproject: text of pyproject.toml.
        resolver: asks the package index.
        folder: where the locks are now.
        held: packages whose version stays.

    Raises:
        ConfigError: the package index cannot be asked, or lacks something.
    """
    images = {name: resolver.pins(requirements(pyproject, wanted), held) for name, wanted in IMAGES.items()}
    of_torch = [pin for pin in images["worker"] if OF_TORCH.fullmatch(pin.name)]
    locks = images | {
        "worker": [pin for pin in images["worker"] if pin not in of_torch],
        "build": resolver.pins(tomllib.loads(pyproject)["build-system"]["requires"], held),
        f"torch-{CUDA_OF_PYPI}": of_torch,
    }
    (torch,) = (pin.version for pin in of_torch if pin.name == "torch")
    for variant in VARIANTS:
        pin, path = LockedPackage("torch", f"{torch}+{variant}", ()), folder / f"torch-{variant}.txt"
        try:
            every = resolver.pins([f"torch=={pin.version}"], (), f"--default-index={TORCH_INDEX}/{variant}")
            locks[path.stem] = [each for each in every if OF_TORCH.fullmatch(each.name)]
        except ConfigError as error:
            locks[path.stem] = [torch_kept(pin, read(path.read_text()) if path.exists() else [])]
            print(f"{path.name} is not renewed: {error}"[:240])
    return locks


def constraints(
    pyproject: str,
    resolver: Resolver,
    locks: Mapping[str, Sequence[LockedPackage]],
    held: Sequence[LockedPackage] = (),
) -> str:
    """The text of constraints.txt: what the locks hold, and what work on the source needs besides.

    Raises:
        ConfigError: the package index cannot be asked, or lacks something.
    """
    versions = {pin.name: pin for pin in held}
    versions |= {pin.name: pin for name, pins in locks.items() if name not in _OF_TORCHS_INDEX for pin in pins}
    # Not on both platforms: some of the tools for tests have no wheel for the second one.
    found = resolver.pins(requirements(pyproject, INSTALLED), list(versions.values()), on=PLATFORMS[:1])
    names = sorted({f"{pin.name}=={pin.version}" for pin in found})
    return "\n".join((f"# Written by `make lock`. {OF_CONSTRAINTS}", *names)) + "\n"


def versions_held(paths: Iterable[Path]) -> list[LockedPackage]:
    """Returns what the files name, and of what several name the first version."""
    found: dict[str, LockedPackage] = {}
    for path in paths:
        for pin in read(path.read_text()) if path.exists() else ():
            found.setdefault(pin.name, pin)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, default=Path("uv"), help="the program that asks the package index")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    arguments = parser.parse_args()
    pyproject = Path("pyproject.toml").read_text()
    paths = () if arguments.upgrade else (*sorted(FOLDER.glob("*.txt")), CONSTRAINTS)
    resolver, held = Resolver(arguments.uv), still_allowed(versions_held(paths), pyproject)
    try:
        locks = lock(pyproject, resolver, FOLDER, held)
        installed = constraints(pyproject, resolver, locks, held)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    FOLDER.mkdir(exist_ok=True)
    for name, pins in locks.items():
        what = WHAT.get(name) or f"Torch of {TORCH_INDEX}/{name.removeprefix('torch-')}"
        (FOLDER / f"{name}.txt").write_text(written(what, pins))
    CONSTRAINTS.write_text(installed)


if __name__ == "__main__":
    main()
