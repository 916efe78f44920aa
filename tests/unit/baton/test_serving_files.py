"""Which files of a model's folder a router gets, under which digest, and that what is written is what was read."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import serving_files
from baton.errors import Conflict, ModelLoadError
from baton.serving_files import MAX_BYTES, MAX_FILES, ProvidedFiles, ServingFiles, is_digest
from router.answer import AnswerFormat
from router.prompt import Tokenizer
from tests.support.model_folders import MARKS, TEMPLATE, backend, write

NAMES = st.from_regex(r"[a-c][a-c._-]{0,3}", fullmatch=True)
SETS = st.dictionaries(NAMES, st.binary(max_size=6), max_size=4)
TOOLS = "{% for t in tools %}{{ t.name }}{% endfor %}" + TEMPLATE


def model(folder: Path) -> Path:
    """A folder with everything that a router reads, and with weights, code and notes."""
    (folder / "additional_chat_templates").mkdir(parents=True)
    backend().save(str(folder / "tokenizer.json"))
    write(folder, "config.json", {"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 64})
    write(folder, "generation_config.json", {"temperature": 0.5, "eos_token_id": 2})
    write(folder, "tokenizer_config.json", {"bos_token": MARKS[0]})
    write(folder, "special_tokens_map.json", {"eos_token": MARKS[2]})
    write(folder, "added_tokens.json", {"<|more|>": 259})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    for name in ("model.safetensors", "model.safetensors.index.json", "modeling.py", "vocab.json", "secret.json"):
        (folder / name).write_bytes(b"{}")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(SETS, SETS)
def test_a_digest_stands_for_one_set(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (ServingFiles(one).digest == ServingFiles(other).digest) == (one == other)
    assert is_digest(ServingFiles(one).digest)


def test_bytes_that_move_between_a_name_and_its_content_change_the_digest() -> None:
    sets = (
        {"a": b"bc", "d": b""},
        {"ab": b"c", "d": b""},
        {"a": b"b", "cd": b""},
        {"a": b"bcd"},
        {"a": b"", "bcd": b""},
    )
    assert len({ServingFiles(each).digest for each in sets}) == len(sets)
    assert ServingFiles({"a": b"1", "b": b"2"}).digest == ServingFiles({"b": b"2", "a": b"1"}).digest


@given(st.dictionaries(st.sampled_from(["a", "b.json", *serving_files.TEMPLATES]), st.binary(max_size=6)))
def test_what_is_written_is_what_is_kept(contents: dict[str, bytes]) -> None:
    """Also files that this release does not know."""
    with tempfile.TemporaryDirectory() as parent:
        files = ServingFiles(contents)
        files.write(Path(parent) / "set")
        assert ServingFiles.kept(Path(parent) / "set").contents == contents
        assert names_in(Path(parent)) == ["set"], "nothing else is left"


def test_a_router_answers_from_the_set_as_from_the_folder(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    files = ServingFiles.of_model(folder)
    assert set(files.contents) == {
        "added_tokens.json", "additional_chat_templates.tool_use.jinja", "chat_template.jinja", "config.json",
        "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    files.write(tmp_path / "set")
    own, got = Tokenizer.load(folder), Tokenizer.load(tmp_path / "set")
    assert got.chat_template.parts == own.chat_template.parts
    assert got.chat_template.reads_tools
    assert (got.eos_ids, got.vocab_size, got.max_model_len) == (own.eos_ids, own.vocab_size, own.max_model_len) == (
        (2,), 260, 64,
    )  # fmt: skip
    assert got.default_sampling == own.default_sampling
    assert got.encode("a <|more|> b") == own.encode("a <|more|> b")
    assert AnswerFormat.load(got) == AnswerFormat.load(own)


def test_the_configured_template_takes_the_place_of_all_others(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    write(folder, "tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "other"}]})
    (tmp_path / "mine.jinja").write_text("mine")
    (tmp_path / "link.jinja").symlink_to(tmp_path / "mine.jinja")
    chosen = str(tmp_path / "link.jinja")
    files = ServingFiles.of_model(folder, chosen)
    files.write(tmp_path / "set")
    own, got = Tokenizer.load(folder, chosen), Tokenizer.load(tmp_path / "set")
    assert got.chat_template.parts == own.chat_template.parts
    assert got.chat_template.source == got.chat_template.source_with_tools == "mine"
    assert files.digest != ServingFiles.of_model(folder).digest
    with pytest.raises(ModelLoadError, match=r"cannot read model\.chat_template .*none: "):
        ServingFiles.of_model(folder, str(tmp_path / "none"))


def test_only_this_user_may_read_what_is_written(tmp_path: Path) -> None:
    files = ServingFiles.of_model(model(tmp_path / "model"))
    files.write(tmp_path / "set")
    for path in (tmp_path / "set", *(tmp_path / "set").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (tmp_path / "shadow").write_text("root:x")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(tmp_path / "shadow")
    with pytest.raises(ModelLoadError, match=r"cannot read .*chat_template\.jinja: it is a link to"):
        ServingFiles.of_model(folder)
    assert ProvidedFiles.of_model(str(folder)) == ProvidedFiles()


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    folder = model(tmp_path / "snapshots" / "r1")
    digest = ServingFiles.of_model(folder).digest
    (tmp_path / "blobs").mkdir()
    (folder / "tokenizer.json").rename(tmp_path / "blobs" / "ab")
    (folder / "tokenizer.json").symlink_to(tmp_path / "blobs" / "ab")
    assert ServingFiles.of_model(folder).digest == digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_what_every_router_needs_provides_nothing(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "model")
    assert ProvidedFiles.of_model(str(folder)).digest == ServingFiles.of_model(folder).digest
    (folder / name).unlink()
    assert ProvidedFiles.of_model(str(folder)) == ProvidedFiles()
    assert ProvidedFiles.of_model("") == ProvidedFiles() == ProvidedFiles.of_model(str(tmp_path / "none"))
    with pytest.raises(Conflict, match="this process provides none"):
        ProvidedFiles().read("")


def test_files_that_are_too_large_are_not_provided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = model(tmp_path / "model")
    os.truncate(folder / "tokenizer.json", MAX_BYTES - 100)
    assert ProvidedFiles.of_model(str(folder)) == ProvidedFiles()
    assert "does not provide the model's files to routers: cannot read" in caplog.text


def test_a_folder_that_has_changed_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    provided = ProvidedFiles.of_model(str(folder))
    assert provided.read(provided.digest).digest == provided.digest
    with pytest.raises(Conflict, match=r"files with the digest 0{12} are not here; this process provides those with"):
        provided.read("0" * 64)
    (folder / "chat_template.jinja").write_text("changed")
    with pytest.raises(Conflict, match="have changed since this process started; restart it"):
        provided.read(provided.digest)
    shutil.rmtree(folder)
    with pytest.raises(Conflict, match="the model's files can no longer be read"):
        provided.read(provided.digest)


def test_a_copy_is_provided_with_files_that_this_release_does_not_know(tmp_path: Path) -> None:
    files = ServingFiles({"new.bin": b"1", "config.json": b"{}"})
    files.write(tmp_path / "set")
    kept = ProvidedFiles(tmp_path / "set", files.digest, is_copy=True)
    assert kept.read(files.digest).contents == files.contents


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\0", "a\n", ".hidden", "-x", "é", "x" * 101,
        "additional_chat_templates", "additional_chat_templates.", "additional_chat_templates...",
        "additional_chat_templates../x", "additional_chat_templates.a/b",
    ],
)  # fmt: skip
def test_a_name_is_plain(name: str) -> None:
    with pytest.raises(ModelLoadError, match="is no name of a model's file"):
        ServingFiles({name: b""})


def test_a_set_is_bounded() -> None:
    ServingFiles({f"f{i}": b"" for i in range(MAX_FILES)})
    with pytest.raises(ModelLoadError, match=rf"at most {MAX_FILES} files of a model; these are {MAX_FILES + 1}"):
        ServingFiles({f"f{i}": b"" for i in range(MAX_FILES + 1)})
    with pytest.raises(ModelLoadError, match=r"at most 67,108,864 bytes of files of a model; these are 67,108,865"):
        ServingFiles({"a": bytes(MAX_BYTES), "b": b"1"})


def test_an_equal_folder_stays_and_another_one_is_replaced(tmp_path: Path) -> None:
    files, target = ServingFiles({"a": b"1"}), tmp_path / "set"
    files.write(target)
    first = target.stat().st_ino
    files.write(target)
    assert target.stat().st_ino == first, "a router may be reading it"
    (target / "a").write_bytes(b"2")
    assert not ServingFiles.is_kept(target, files.digest)
    files.write(target)
    assert ServingFiles.is_kept(target, files.digest)
    (target / "b").write_bytes(b"")
    files.write(target)
    assert ServingFiles.is_kept(target, files.digest)
    target_file = tmp_path / "file"
    target_file.write_text("no folder")
    files.write(target_file)
    assert ServingFiles.is_kept(target_file, files.digest)
    assert names_in(tmp_path) == ["file", "set"]


def test_several_may_write_one_folder_at_a_time(tmp_path: Path) -> None:
    files = ServingFiles({f"f{i}": os.urandom(1000) for i in range(8)})
    errors: list[Exception] = []
    start = threading.Barrier(6)

    def write_it() -> None:
        start.wait()
        try:
            files.write(tmp_path / "set")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write_it) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert ServingFiles.is_kept(tmp_path / "set", files.digest)
    assert names_in(tmp_path) == ["set"]


def test_a_folder_that_nobody_can_write_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        ServingFiles({"a": b""}).write(tmp_path / "none" / "set")
