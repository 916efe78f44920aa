"""The locks of the images and constraints.txt: they fit pyproject.toml, and agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.locks import LOCKS, hashes
from tools.lock import OF_TORCH, lock

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES: list[str] = PROJECT["project"]["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
UNKNOWN_FILES = {"torch-cu126", "torch-cu129"}
"""Locks that only PyTorch's own index can fill, for older drivers; until a release does, pip refuses them."""
PINS = {name: dict(pin.split("==") for pin in pins) for name, pins in LOCKS.items()}
CONSTRAINED = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def unmet(versions: dict[str, str], wanted: list[str]) -> list[str]:
    """Requirements that the versions do not meet."""
    return [
        str(each)
        for each in map(Requirement, wanted)
        if not each.specifier.contains(versions.get(each.name.lower(), "0"))
    ]


def test_the_locks_are_those_that_the_images_install() -> None:
    assert LOCKS.keys() == {"build", "router", "worker", "torch-cpu", "torch-cu126", "torch-cu129", "torch-cu130"}
    (python,) = re.findall(r"^IMAGES_PYTHON := (\S+)$", MAKEFILE, re.MULTILINE)
    for name in ("router", "worker"):
        text = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
        assert f"-r locks/{name}.txt" in text
        assert f"ARG PYTHON={python}-" in text, "`make lock` after a change of Python's version"


def test_packages_of_the_image_with_vllm_are_locked_for_its_python() -> None:
    """Of those that are compiled for one Python there are four files: two processors, two Pythons."""
    dockerfile = (ROOT / "deploy" / "docker" / "worker-vllm.Dockerfile").read_text()
    (python,) = re.findall(r"^VLLM_IMAGES_PYTHON := (\d+)\.(\d+)$", MAKEFILE, re.MULTILINE)
    assert f"({', '.join(python)})" in dockerfile
    for name in ("worker", "torch-cu130"):
        assert f"-r locks/{name}.txt" in dockerfile
    compiled = {
        pin.partition("==")[0]: len(found) for pin, found in {**LOCKS["worker"], **LOCKS["torch-cu130"]}.items()
    }
    assert {compiled[name] for name in ("torch", "triton", "numpy", "ray", "pydantic-core")} == {4}


def test_locks_and_constraints_meet_every_requirement_of_pyproject() -> None:
    """After a change of pyproject.toml: `make lock`."""
    assert unmet(PINS["build"], PROJECT["build-system"]["requires"]) == []
    assert unmet(PINS["router"], DEPENDENCIES) == []
    assert unmet(PINS["worker"] | PINS["torch-cu130"], [*DEPENDENCIES, *EXTRAS["worker"]]) == []
    assert (
        unmet(CONSTRAINED, [*DEPENDENCIES, *(line for name in EXTRAS if name != "docs" for line in EXTRAS[name])]) == []
    )


def test_no_lock_differs_from_the_constraints() -> None:
    for name, pins in PINS.items():
        versions = {package: version.partition("+")[0] for package, version in pins.items()}
        assert (name in UNKNOWN_FILES) or versions.items() <= CONSTRAINED.items(), name


def test_the_wheel_asks_for_ranges_and_make_install_for_exact_versions() -> None:
    """A user's environment has other packages, too. What the tests ran with is in the lock."""
    lines = [*DEPENDENCIES, *(line for extra in EXTRAS if extra != "docs" for line in EXTRAS[extra])]
    exact = [line for line in lines if any(each.operator == "==" for each in Requirement(line).specifier)]
    assert (exact, len(lines) > 40) == ([], True)
    assert "CONSTRAINTS := constraints.txt\n" in MAKEFILE
    (pip,) = re.findall(r"^PIP := (.*)$", MAKEFILE, re.MULTILINE)
    assert pip.endswith("-c $(CONSTRAINTS)")
    (installed,) = re.findall(r"-e '\.\[(\S+)\]'", MAKEFILE)
    assert " ".join(f"--extra {extra}" for extra in installed.split(",")) in MAKEFILE, "`make lock` has the same extras"


def test_every_build_of_torch_is_the_version_of_the_constraints() -> None:
    for name, pins in PINS.items():
        local = "" if name == "torch-cu130" else name.replace("torch-", "+")
        assert pins.get("torch") == (CONSTRAINED["torch"] + local if name.startswith("torch-") else None), name


def test_nothing_is_installed_whose_hash_is_unknown() -> None:
    for name, pins in LOCKS.items():
        assert pins
        without = [pin for pin, found in pins.items() if not found]
        assert [pin.partition("==")[0] for pin in without] == (["torch"] if name in UNKNOWN_FILES else []), name


def test_no_lock_names_an_index_or_a_file() -> None:
    for path in (ROOT / "deploy" / "docker" / "locks").glob("*.txt"):
        assert all(
            re.fullmatch(r"[a-z0-9.-]+==\S+( \\)?|    --hash=sha256:[0-9a-f]{64}( \\)?|#.*", line)
            for line in path.read_text().splitlines()
        )


def test_the_cpu_image_gets_torch_from_its_own_lock_alone() -> None:
    assert not [package for package in PINS["worker"] if OF_TORCH.fullmatch(package)]
    assert PINS["torch-cpu"].keys() == {"torch"}
    assert {"nvidia-nccl-cu13", "torch", "triton"} <= PINS["torch-cu130"].keys()


def test_pip_is_never_run_on_what_no_lock_holds() -> None:
    for path in (ROOT / "deploy" / "docker").glob("*.Dockerfile"):
        installs = re.findall(
            r"pip install (.*?)(?= &&|\nRUN|\nFROM|\nCOPY|\n#)", path.read_text().replace("\\\n", " ")
        )
        assert installs
        for words in installs:
            assert "--no-deps" in words
            assert "--require-hashes" in words or words.split()[-1] == "wheels/*.whl"
        assert "pip wheel --no-deps --no-build-isolation" in path.read_text()
        assert path.read_text().count("pip check") == 1


def pylock(*pins: tuple[str, str, str]) -> str:
    """What uv finds for a processor: name, version and hash of each package."""
    return "".join(
        f'[[packages]]\nname = "{name}"\nversion = "{version}"\n'
        f'wheels = [{{url = "https://x/{name}.whl", hashes = {{sha256 = "{digest * 64}"}}}}]\n'
        for name, version, digest in pins
    )


def test_a_lock_has_the_files_for_both_processors_and_torch_another_lock() -> None:
    intel = pylock(("h11", "3", "a"), ("torch", "2", "b"), ("triton", "1", "c"))
    arm = pylock(("h11", "3", "a"), ("torch", "2", "d"), ("triton", "1", "c"))
    assert hashes(lock([intel, arm], of_torch=False)) == {"h11==3": ["a" * 64]}
    assert hashes(lock([intel, arm], of_torch=True)) == {"torch==2": ["b" * 64, "d" * 64], "triton==1": ["c" * 64]}


def test_processors_with_different_packages_are_no_one_lock() -> None:
    with pytest.raises(ValueError, match=r"need different packages: \['h11==3', 'h11==4'\]"):
        lock([pylock(("h11", "3", "a")), pylock(("h11", "4", "b"))], of_torch=False)
