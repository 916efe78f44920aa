"""A library or packed weights that another user has put where ours are expected are not loaded; ours are made anew."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from pathlib import Path

import pytest

from baton.errors import NotNative
from baton.own_files import ForeignFile
from engine.native import build, layout, packed_file
from engine.native.runner import _load_library
from engine.native.weights_cache import WeightsCache
from tests.support.foreign import FOREIGN, given_away
from tests.unit.engine.native.test_weights_cache import make_checkpoint, some_model

CALLS = "void baton_open(void){} int baton_step(void){return %d;} void baton_close(void){}\n"
OURS, THEIRS = 1, 2
EVIL = f"""
#include <fcntl.h>
__attribute__((constructor)) static void at_load(void) {{ open("MARKER", O_CREAT | O_WRONLY, 0600); }}
{CALLS % THEIRS}
"""
VARIANT = "x86-64-v3"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A library that leaves a mark when it is loaded."""
    source, library = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(EVIL.replace("MARKER", str(tmp_path / "it-was-loaded")))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of libraries, of a source that is built at once."""
    source = tmp_path / "step.c"
    source.write_text(CALLS % OURS)
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return tmp_path / "cache" / "native"


def returned_by(library: ctypes.CDLL) -> int:
    library.baton_step.argtypes = []
    found: int = library.baton_step()
    return found


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("what", ["the library", "the folder"])
def test_a_library_of_another_is_not_loaded(
    what: str, kind: str, evil: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = build.library(folder, VARIANT)
    evil.replace(path)
    path.chmod(0o755)
    is_ours = what == "the library" or kind == "open to others"
    if what == "the folder" and is_ours:
        given_away(path, monkeypatch)  # the folder is ours, and is closed; what others have put into it is theirs
    FOREIGN[kind](path if what == "the library" else folder, monkeypatch)
    before = path.stat()
    with caplog.at_level(logging.WARNING):
        library = _load_library(folder, VARIANT)
    assert not (evil.parent / "it-was-loaded").exists()
    assert returned_by(library) == OURS
    if is_ours:
        assert "the native step is built anew, since " in caplog.text
        assert returned_by(layout.load(path)) == OURS, "the next start finds it"
    else:
        assert "the native step is built for this process alone, since " in caplog.text
        assert path.stat() == before, "what is another's is left alone"


def test_a_library_that_is_replaced_after_it_was_looked_at_is_not_loaded(
    evil: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.library(folder, VARIANT)
    real = ctypes.CDLL

    def late(name: str) -> ctypes.CDLL:
        evil.replace(path)
        return real(name)

    monkeypatch.setattr(ctypes, "CDLL", late)
    assert returned_by(layout.load(path)) == OURS
    assert not (evil.parent / "it-was-loaded").exists()


def test_libraries_of_one_process_are_not_taken_for_each_other(folder: Path) -> None:
    assert build.SOURCE.parent != folder
    first = layout.load(build.library(folder, VARIANT))
    build.SOURCE.write_text(CALLS % THEIRS)
    second = layout.load(build.library(folder, VARIANT))
    assert (returned_by(first), returned_by(second)) == (OURS, THEIRS)


def test_what_cannot_be_built_elsewhere_either_is_no_native_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_away(build.library(folder, VARIANT).parent, monkeypatch)
    monkeypatch.setattr(build, "COMPILERS", ())
    with pytest.raises(NotNative, match="there is no C compiler"):
        _load_library(folder, VARIANT)


@pytest.mark.parametrize("kind", FOREIGN)
def test_packed_weights_of_another_are_not_mapped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WeightsCache(tmp_path / "native", make_checkpoint(tmp_path / "model"))
    assert cache.keep(some_model()) is not None
    (path,) = (tmp_path / "native").glob("*.packed")
    FOREIGN[kind](path, monkeypatch)
    for read in (packed_file.read, packed_file.read_about):
        with pytest.raises(ForeignFile):
            read(path)
    with caplog.at_level(logging.WARNING):
        assert cache.find() is None
    assert f"the packed weights in {path} cannot be used and are made anew: " in caplog.text


@pytest.mark.parametrize("kind", ["another's", "a link"])
def test_no_weights_are_kept_in_a_folder_of_another(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    cache = WeightsCache(folder, make_checkpoint(tmp_path / "model"))
    FOREIGN[kind](folder, monkeypatch)
    with caplog.at_level(logging.WARNING), cache.opened() as kept:
        assert kept is None
        assert cache.keep(some_model()) is None
    assert list(folder.iterdir()) == []
    assert "the packed weights are not kept, each worker has its own: " in caplog.text
