"""The library of `step.c` is built once, whole, for the CPU that is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.errors import NotNative
from engine.native import build, unused

COMPILER = """#!/bin/sh
echo built >> {log}
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo library > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes that it was called, in the file that this returns."""
    log, program = tmp_path / "log", tmp_path / "bin" / "gcc"
    program.parent.mkdir()
    program.write_text(COMPILER.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return log


def test_it_is_built_once_for_all_who_ask_at_a_time(compiler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "native"
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build.library(folder, "x86-64-v3"), range(4)))
    assert len(set(paths)) == 1
    assert paths[0].read_text() == "library\n"
    assert compiler.read_text() == "built\n"
    assert sorted(path.name for path in folder.iterdir()) == ["build.lock", paths[0].name]


def test_another_variant_source_or_compiler_is_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {build.library(tmp_path, variant) for variant in build.VARIANTS}
    source = tmp_path / "step.c"
    source.write_text("int other;")
    with monkeypatch.context() as edited:
        edited.setattr(build, "SOURCE", source)
        paths.add(build.library(tmp_path, "x86-64-v3"))
        (tmp_path / "part.h").write_text("int part;")  # as `step.c` includes its parts
        paths.add(build.library(tmp_path, "x86-64-v3"))
    with (compiler.parent / "bin" / "gcc").open("a") as program:
        program.write("# of another version\n")
    paths.add(build.library(tmp_path, "x86-64-v3"))
    assert len(paths) == len(build.VARIANTS) + 3


def test_what_an_image_has_is_taken_without_a_compiler(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.main(tmp_path / "built")
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("PATH", str(tmp_path))
    for variant in build.VARIANTS:
        assert build.library(tmp_path / "cache", variant).parent == tmp_path / "built"
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_fails_leaves_nothing_and_its_words(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiler.parent / "bin" / "gcc").write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    with pytest.raises(NotNative, match=r"gcc cannot build step.c: no such flag"):
        build.library(tmp_path / "cache", "x86-64-v3")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["build.lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotNative, match="cannot be written"):
        build.library(tmp_path / "file", "x86-64-v3")


def aged(path: Path, seconds: float = 2 * unused.UNUSED_S) -> Path:
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_libraries_that_nobody_has_used_for_a_month_go_when_another_is_built(compiler: Path, tmp_path: Path) -> None:
    used, unopened, young = (
        build.library(tmp_path, variant) for variant in ("x86-64-v3", "x86-64-v4", "x86-64-v4+avx512vnni")
    )
    killed = tmp_path / f"{unopened.stem}-abc_12.part"
    killed.write_text("")
    for path in (used, unopened, killed):
        aged(path)
    aged(young, unused.UNUSED_S / 2)
    assert build.library(tmp_path, "x86-64-v3") == used
    assert unopened.exists(), "nothing was built"
    with (compiler.parent / "bin" / "gcc").open("a") as program:
        program.write("# of another version\n")
    built = build.library(tmp_path, "x86-64-v3")
    assert set(tmp_path.glob("step-*")) == {used, young, built}


def test_a_cpu_gets_the_best_that_it_has() -> None:
    both = build.VARIANTS["x86-64-v3"] | build.VARIANTS["x86-64-v4"]
    assert build.variant_of(both | {"sse2"}) == "x86-64-v4"
    assert build.variant_of(both | {"avx512_vnni"}) == "x86-64-v4+avx512vnni"
    assert build.variant_of(build.V3 | {"avx512_vnni"}) == "x86-64-v3"
    assert build.variant_of(build.AMX) == "x86-64-v4+avx512vnni+avx512bf16+amx-tile+amx-bf16"
    assert build.variant_of(build.AMX - {"amx_tile"}) == "x86-64-v4+avx512vnni"
    assert build.variant_of(both - {"avx512dq"}) == "x86-64-v3"
    with pytest.raises(NotNative, match="neither AVX-512 nor AVX2"):
        build.variant_of(both - {"fma"})
    assert build.cpu_flags(Path("/no/such/file")) == frozenset()


def test_building_and_describing_need_no_torch() -> None:
    modules = "engine.native.build, engine.native.layout, engine.native.spec"
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
