"""The files that a router needs to serve a model: configuration, tokenizer and chat template, but no weights.

Workers provide them, and the controller keeps a copy, so that a router needs no folder of the model. A set of files has
one digest: the controller announces it, and receivers verify the files against it.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.errors import Conflict, ModelLoadError
from baton.model_files import open_own
from baton.own_folder import own_folder
from baton.plain_files import read_plain

logger = logging.getLogger(__name__)

CONFIG, TOKENIZER, TEMPLATE = "config.json", "tokenizer.json", "chat_template.jinja"
FILES = (
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files that routers read, without those of chat templates."""
TEMPLATES_FOLDER = "additional_chat_templates"
TEMPLATES = (TEMPLATE, f"{TEMPLATES_FOLDER}.default.jinja", f"{TEMPLATES_FOLDER}.tool_use.jinja")
"""Chat templates that routers read. A dot in place of the separator keeps the names of a set plain."""
MAX_FILES = 32
MAX_BYTES = 64 * 2**20
"""Maximum size of a set. The largest known tokenizers have 35 MiB."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_ATTEMPTS = 3
"""Maximum number of attempts to replace a folder that other processes write at the same time."""
SHOWN_DIGITS = 12
"""Digits of a digest in messages."""


@dataclass(frozen=True)
class ServingFiles:
    """Contents of a set of files, by name.

    Names are plain, so a file's name cannot lead out of a folder. A later release of Baton may add files; earlier ones
    keep and verify files that they do not know.

    Raises:
        ModelLoadError: a name is not plain, or there are too many files or bytes.
    """

    contents: Mapping[str, bytes]

    def __post_init__(self) -> None:
        check_bounds(len(self.contents), sum(map(len, self.contents.values())))
        for name in self.contents:
            check_name(name)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents, in the order of the names, in hexadecimal digits.

        Each name and content is preceded by its length, so that no two sets have the same bytes.
        """
        hashed = hashlib.sha256(b"baton serving files 1\0")
        for name, content in sorted(self.contents.items()):
            for part in (name.encode(), content):
                hashed.update(len(part).to_bytes(8, "big"))
                hashed.update(part)
        return hashed.hexdigest()

    @staticmethod
    def of_model(folder: Path, chat_template: str = "") -> ServingFiles:
        """Read the files of a model's folder.

        Args:
            chat_template: path of a file whose template replaces those of the folder (`model.chat_template`).

        Raises:
            ModelLoadError: config.json or tokenizer.json is missing, a file cannot be read or is a link to a file
                outside the folder, or the files are too large.
        """
        contents: dict[str, bytes] = {}
        for name in FILES if chat_template else (*FILES, *TEMPLATES):
            path = _place(folder, name)
            if name in (CONFIG, TOKENIZER) or path.is_file():
                contents[name] = _read(path, MAX_BYTES - sum(map(len, contents.values())))
        if chat_template:
            try:
                contents[TEMPLATE] = read_plain(Path(chat_template))
            except OSError as error:
                raise ModelLoadError(f"cannot read model.chat_template {chat_template}: {error}") from error
        return ServingFiles(contents)

    @staticmethod
    def kept(folder: Path) -> ServingFiles:
        """Read a folder that `write` has written. Its digest shows whether it is still the same.

        Raises:
            ModelLoadError: it cannot be read, or holds something other than such files.
        """
        contents: dict[str, bytes] = {}
        try:
            for path in sorted(folder.iterdir()):
                if path.name != TEMPLATES_FOLDER:
                    contents[path.name] = _read(path, MAX_BYTES)
                    continue
                for inner in sorted(path.iterdir()):
                    contents[f"{TEMPLATES_FOLDER}.{inner.name}"] = _read(inner, MAX_BYTES)
                check_bounds(len(contents), sum(map(len, contents.values())))
        except OSError as error:
            raise ModelLoadError(f"cannot read {folder}: {error}") from error
        return ServingFiles(contents)

    def write(self, folder: Path) -> None:
        """Write the set as a folder that a router can load like a model's, and that only this user may read.

        The folder appears at once with all of its files. A folder with the same content stays as it is, even if another
        process writes it at the same time. A folder with other content is replaced.

        Raises:
            OSError: the parent folder does not exist, or nothing can be written there.
        """
        with own_folder(folder.parent) as own:
            made = own / "files"
            made.mkdir(mode=0o700)
            for name, content in self.contents.items():
                path = _place(made, name)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o600)
            for _ in range(MAX_ATTEMPTS):
                if self.is_kept(folder, self.digest):
                    return
                with suppress(FileNotFoundError):
                    folder.rename(own / "replaced")
                shutil.rmtree(own / "replaced", ignore_errors=True)
                try:
                    made.rename(folder)
                except OSError as error:  # another process has written the folder in the meantime
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                else:
                    return
        raise OSError(f"another process keeps writing {folder}")

    @staticmethod
    def is_kept(folder: Path, digest: str) -> bool:
        """Return whether a folder holds the set with a digest, and nothing else."""
        try:
            return ServingFiles.kept(folder).digest == digest
        except ModelLoadError:
            return False


@dataclass(frozen=True, slots=True)
class ProvidedFiles:
    """Files of a folder that a process provides to others. It reads them again for each reader, and keeps none in
    memory.

    The default value provides none.
    """

    folder: Path = Path()
    digest: str = ""
    """Digest of the files as they were at the start of the process; empty: it provides none."""
    chat_template: str = ""
    """See `ServingFiles.of_model`."""
    is_copy: bool = False
    """True if the folder is one that `ServingFiles.write` has written, and not a model's."""

    @staticmethod
    def of_model(folder: str, chat_template: str = "") -> ProvidedFiles:
        """Return the files of a model's folder. Log a warning and provide none if a router could not use them.

        Args:
            folder: path of the folder; empty: there is none.
        """
        if not folder or not (Path(folder) / TOKENIZER).is_file():
            return ProvidedFiles()
        try:
            digest = ServingFiles.of_model(Path(folder), chat_template).digest
        except ModelLoadError as error:
            logger.warning("this process does not provide the model's files to routers: %s", error)
            return ProvidedFiles()
        return ProvidedFiles(Path(folder), digest, chat_template=chat_template)

    def read(self, digest: str) -> ServingFiles:
        """Read the files with that digest.

        Raises:
            Conflict: this process does not provide them, or they have changed since its start.
        """
        if not self.digest or digest != self.digest:
            own = f"those with the digest {self.digest[:SHOWN_DIGITS]}" if self.digest else "none"
            raise Conflict(f"files with the digest {digest[:SHOWN_DIGITS]} are not here; this process provides {own}")
        try:
            found = ServingFiles.kept(self.folder) if self.is_copy else self._of_model()
        except ModelLoadError as error:
            raise Conflict(f"the model's files can no longer be read: {error}") from error
        if found.digest != digest:
            raise Conflict(
                f"the files in {self.folder} have changed since this process started; restart it so that it provides "
                "the new ones"
            )
        return found

    def _of_model(self) -> ServingFiles:
        return ServingFiles.of_model(self.folder, self.chat_template)


def check_bounds(num_files: int, num_bytes: int) -> None:
    """Raise ModelLoadError for a set with too many files or bytes."""
    if num_files > MAX_FILES:
        raise ModelLoadError(f"a router takes at most {MAX_FILES} files of a model; these are {num_files}")
    if num_bytes > MAX_BYTES:
        raise ModelLoadError(f"a router takes at most {MAX_BYTES:,} bytes of files of a model; these are {num_bytes:,}")


def check_name(name: str) -> None:
    """Raise ModelLoadError for a name that could lead to another folder, or that a set cannot have."""
    inner = name.removeprefix(f"{TEMPLATES_FOLDER}.")
    if name == TEMPLATES_FOLDER or not PLAIN_NAME.fullmatch(inner):
        raise ModelLoadError(f"{name[:100]!a} is no name of a model's file; it must be letters, digits, dots, _ or -")


def is_digest(text: str) -> bool:
    """Return whether a text may be the digest of a set."""
    return DIGEST.fullmatch(text) is not None


def _place(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder."""
    prefix = f"{TEMPLATES_FOLDER}."
    return folder / TEMPLATES_FOLDER / name.removeprefix(prefix) if name.startswith(prefix) else folder / name


def _read(path: Path, most: int) -> bytes:
    try:
        with open_own(path, most) as file:
            return file.read(most)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
