"""The locks of the images and constraints.txt: they fit pyproject.toml, agree, and are made as they say."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baton.errors import ConfigError
from tools import lock
from tools.lock import (
    CONSTRAINTS,
    FOLDER,
    IMAGES,
    INSTALLED,
    OF_TORCH,
    LockedPackage,
    Resolver,
    constraints,
    merged,
    read,
    requirements,
    still_allowed,
    versions_held,
    written,
)

ROOT = Path(__file__).parents[3]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
LOCKS = {path.stem: read(path.read_text()) for path in sorted((ROOT / FOLDER).glob("*.txt"))}
UNKNOWN_FILES = {"torch-cu126", "torch-cu129"}
"""Locks that only PyTorch's own index can fill, for older drivers; until a release does, pip refuses them."""


CONSTRAINED = {pin.name: pin.version for pin in read((ROOT / CONSTRAINTS).read_text())}


def unmet(held: dict[str, str], wanted: tuple[str, ...]) -> list[str]:
    """Requirements of pyproject.toml that the versions do not meet."""
    ranges = map(Requirement, requirements(PYPROJECT, wanted))
    return [str(each) for each in ranges if not each.specifier.contains(held.get(each.name.lower(), "0"))]


def test_the_locks_are_those_that_the_images_install() -> None:
    assert LOCKS.keys() == {"build", "router", "worker", "torch-cpu", "torch-cu126", "torch-cu129", "torch-cu130"}
    for name in ("router", "worker"):
        text = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
        assert f"-r locks/{name}.txt" in text
        assert f"ARG PYTHON={lock.PYTHON}-" in text, "`make lock` after a change of Python's version"


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_meets_every_requirement_of_pyproject(image: str) -> None:
    """After a change of pyproject.toml: `make lock`."""
    assert unmet({pin.name: pin.version for name in (image, "torch-cu130") for pin in LOCKS[name]}, IMAGES[image]) == []


def test_the_constraints_meet_every_requirement_and_are_the_locks_where_those_say_something() -> None:
    assert unmet(CONSTRAINED, INSTALLED) == []
    for name in ("router", "worker", "torch-cu130"):
        versions = {pin.name: pin.version for pin in LOCKS[name]}
        assert versions.items() - CONSTRAINED.items() == set(), name


def test_the_wheel_asks_for_ranges_and_make_install_for_exact_versions() -> None:
    """A user's environment has other packages, too. What the tests ran with is in the lock."""
    extras = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]
    del extras["docs"]  # for an environment of its own, which is no part of the lock
    lines = [*requirements(PYPROJECT, ()), *(line for extra in extras for line in extras[extra])]
    exact = [line for line in lines if any(each.operator == "==" for each in Requirement(line).specifier)]
    assert (exact, len(lines) > 40) == ([], True)
    makefile = (ROOT / "Makefile").read_text()
    assert f"CONSTRAINTS := {CONSTRAINTS}\n" in makefile
    (pip,) = re.findall(r"^PIP := (.*)$", makefile, re.MULTILINE)
    assert pip.endswith("-c $(CONSTRAINTS)")
    assert f"'.[{','.join(INSTALLED)}]'" in makefile


def test_every_build_of_torch_is_the_version_of_the_constraints() -> None:
    version = CONSTRAINED["torch"]
    for name, pins in LOCKS.items():
        found = {pin.version for pin in pins if pin.name == "torch"}
        local = "" if name == "torch-cu130" else name.replace("torch-", "+")
        assert found == ({version + local} if name.startswith("torch-") else set()), name


def test_nothing_is_installed_whose_hash_is_unknown() -> None:
    for name, pins in LOCKS.items():
        assert pins
        without = [pin.name for pin in pins if not pin.hashes]
        assert without == (["torch"] if name in UNKNOWN_FILES else []), name
        assert (lock.UNKNOWN in (ROOT / FOLDER / f"{name}.txt").read_text()) == bool(without)


def test_no_lock_names_an_index_or_a_file_and_none_differs_from_another() -> None:
    versions: dict[str, set[str]] = {}
    for name, pins in LOCKS.items():
        lines = (ROOT / FOLDER / f"{name}.txt").read_text().splitlines()
        assert all(
            re.fullmatch(r"[a-z0-9.-]+==\S+( \\)?|    --hash=sha256:[0-9a-f]{64}( \\)?|#.*", line) for line in lines
        )
        for pin in pins:
            versions.setdefault(pin.name, set()).add(pin.version.partition("+")[0])
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_the_cpu_image_gets_torch_from_its_own_lock_alone() -> None:
    assert not [pin.name for pin in LOCKS["worker"] if OF_TORCH.fullmatch(pin.name)]
    assert [pin.name for pin in LOCKS["torch-cpu"]] == ["torch"]
    assert {"nvidia-nccl-cu13", "torch", "triton"} <= {pin.name for pin in LOCKS["torch-cu130"]}


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


UV = """#!{python}
import sys
from pathlib import Path
wanted = sys.stdin.read().split()
with (Path(__file__).parent / "asked").open("a") as file:
    print(*wanted, *sys.argv[1:], file=file)
if any("--default-index" in each for each in sys.argv) and "{torch_index}" != "up":
    sys.exit("error: no route to host")
platform = next(each for each in sys.argv if "platform" in each).partition("=")[2][:7].strip("_-")
held = next(each for each in sys.argv if each.startswith("--constraints=")).partition("=")[2]
with (Path(__file__).parent / "held").open("a") as file:
    print(*Path(held).read_text().split(), file=file)
for line in sorted(set([*wanted, "triton==1" if "torch==2" in wanted else "h11==3"])):
    name, _, version = line.partition("==")
    digest = format(sum(map(ord, line + platform)), "064x")
    print(f'[[packages]]\\nname = "{{name}}"\\nversion = "{{version}}"')
    print(f'wheels = [{{{{url = "https://x/{{name}}.whl", hashes = {{{{sha256 = "{{digest}}"}}}}}}}}]')
"""
PROJECT = """
[build-system]
requires = ["hatchling==1"]
[project]
dependencies = ["grpcio==1"]
[project.optional-dependencies]
worker = ["huggingface-hub==1", "numpy==1", "safetensors==1", "torch==2"]
local = ["gguf==1", "lightkube==1", "ray==1"]
plot = []
dev = ["pytest==4"]
"""


def uv(folder: Path, torch_index: str = "") -> Resolver:
    path = folder / "uv"
    path.write_text(UV.format(python=sys.executable, torch_index=torch_index))
    path.chmod(0o755)
    return Resolver(path)


def test_a_lock_is_what_uv_finds_for_both_processors(tmp_path: Path) -> None:
    locks = lock.lock(PROJECT, uv(tmp_path, "up"), tmp_path)
    assert [pin.name for pin in locks["router"]] == ["gguf", "grpcio", "h11", "huggingface-hub", "numpy", "safetensors"]
    assert [pin.name for pin in locks["worker"]] == [
        *("gguf", "grpcio", "huggingface-hub", "lightkube", "numpy", "ray", "safetensors")
    ]
    assert [pin.name for pin in locks["torch-cu130"]] == ["torch", "triton"]
    assert locks["torch-cpu"][-1].version == "2+cpu"
    assert {len(pin.hashes) for pins in locks.values() for pin in pins} == {2}, "a file for each processor"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all("--no-config" in line and "--only-binary=:all:" in line for line in asked)
    assert set((tmp_path / "held").read_text().split()) == set(), "nothing was locked"
    for name, pins in locks.items():
        assert read(written(name, pins)) == pins
        assert lock.UNKNOWN not in written(name, pins)


def test_torch_that_cannot_be_asked_for_is_kept_or_has_no_hash(tmp_path: Path) -> None:
    resolver = uv(tmp_path)
    (tmp_path / "torch-cpu.txt").write_text(written("x", [LockedPackage("torch", "2+cpu", ("a" * 64,))]))
    (tmp_path / "torch-cu126.txt").write_text(written("x", [LockedPackage("torch", "1+cu126", ("b" * 64,))]))
    locks = lock.lock(PROJECT, resolver, tmp_path)
    assert locks["torch-cpu"] == [LockedPackage("torch", "2+cpu", ("a" * 64,))]
    assert locks["torch-cu126"] == [LockedPackage("torch", "2+cu126", ())], "the old file's hash is of another version"
    assert lock.UNKNOWN in written("x", locks["torch-cu126"])


def test_an_index_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"uv cannot lock torch==2 and 0 more: error: no route to host"):
        uv(tmp_path).pins(["torch==2"], (), "--default-index=x")
    with pytest.raises(ConfigError, match=r"no route to host; `make lock UPGRADE=1` keeps no version that was locked"):
        uv(tmp_path).pins(["torch==2"], [LockedPackage("torch", "1", ())], "--default-index=x")


def test_what_is_locked_stays_while_its_range_allows_it(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("grpcio==1\ngguf==7\n")
    (tmp_path / "two.txt").write_text("grpcio==3\nh11==3\npytest==9\ntorch==2+cpu\n")
    held = versions_held([tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "none.txt"])
    assert [f"{pin.name}=={pin.version}" for pin in held] == (
        ["grpcio==1", "gguf==7", "h11==3", "pytest==9", "torch==2+cpu"]
    )
    kept = still_allowed(held, PROJECT)
    assert [pin.name for pin in kept] == ["grpcio", "h11", "torch"], "what no requirement names stays, too"
    locks = lock.lock(PROJECT, uv(tmp_path, "up"), tmp_path, kept)
    lines = Counter((tmp_path / "held").read_text().splitlines())
    # Two images and the build for two processors; of torch's own index three builds.
    assert lines == {"grpcio==1 h11==3 torch==2": 6, "": 6}, "torch's own index is asked without"
    assert "torch" in [pin.name for pin in locks["torch-cpu"]]


def test_the_constraints_are_the_locks_and_what_else_is_installed(tmp_path: Path) -> None:
    locks = lock.lock(PROJECT, uv(tmp_path, "up"), tmp_path)
    (tmp_path / "held").unlink()
    kept = [LockedPackage("h11", "2", ()), LockedPackage("pytest", "4", ())]
    (_, *lines) = constraints(PROJECT, uv(tmp_path), locks, kept).splitlines()
    assert {"grpcio==1", "pytest==4", "torch==2", "triton==1"} <= set(lines)
    assert lines == sorted(lines)
    (held,) = (tmp_path / "held").read_text().splitlines()
    assert {"h11==3", "pytest==4", "torch==2"} <= set(held.split()), "what an image has goes before what was held"


def test_processors_with_different_packages_are_no_one_lock() -> None:
    one, other = LockedPackage("a", "1", ("a" * 64,)), LockedPackage("a", "1", ("b" * 64,))
    assert merged([[one], [other]]) == [LockedPackage("a", "1", ("a" * 64, "b" * 64))]
    with pytest.raises(ConfigError, match=r"need different packages: \{\('a', '2'\)"):
        merged([[one], [one, LockedPackage("a", "2", ())]])


def test_a_package_that_is_no_requirement_is_refused() -> None:
    with pytest.raises(KeyError):
        requirements(PYPROJECT, ["local:no-such"])
    assert "torch>=" not in "".join(requirements(PYPROJECT, IMAGES["router"]))
    assert len(requirements(PYPROJECT, ())) == len(tomllib.loads(PYPROJECT)["project"]["dependencies"])
