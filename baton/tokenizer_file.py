"""Tokenizer of a model's folder, as transformers reads it, from four untrusted files.

`tokenizer.json` has nearly all of it. `tokenizer_config.json`, or in older folders `special_tokens_map.json` and
`added_tokens.json`, may name further tokens, and define the start and end tokens of a text. For some models,
transformers builds other steps than tokenizer.json has: see `tokenizer_classes`. The rules follow transformers'
`AutoTokenizer`, `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__` (5.23). Two files that give
one token different ids are rejected.

A tokenizer is also rejected if a short text could grow without a limit, or take unlimited time to be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from baton.errors import ModelLoadError
from baton.model_files import of_text, read_json, whole
from baton.plain_files import LFS_POINTER, NOT_FETCHED, read_plain
from baton.rust import complaint_of
from baton.tokenizer_classes import BUILT, advice, build, class_of, finish, fix_words, replaced_parts, warn_once

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
MAP_FILE, ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
MAX_FILE_BYTES = 256 * 2**20
MAX_TOKEN_CHARACTERS = 1024
"""Maximum characters of an added token."""
MAX_SEARCHED_CHARACTERS = 2**26
"""Maximum sum of the squares of the special tokens' lengths: this many parts are searched in clients' texts."""
MAX_SPECIAL = 2**14
"""Maximum number of special tokens. Models reserve one or two thousand."""
MAX_HOLES = 2**16
"""Maximum number of unused ids, in addition to the number of tokens."""
MAX_GROWTH = 64
"""Maximum factor by which a text may grow before or after it is cut into tokens."""
MAX_ADDED = 512
"""Maximum characters, or special tokens, that may be put around a text."""


@dataclass(frozen=True, slots=True)
class _Described:
    """Settings of the tokenizer in the files other than tokenizer.json."""

    said: dict[str, Any]
    """tokenizer_config.json, in older folders with special_tokens_map.json, and the defaults of the class."""
    is_legacy: bool
    """True if tokenizer_config.json lists no tokens, so that older files count, too."""
    class_name: str
    """Class that builds the tokenizer; empty: tokenizer.json is used unchanged."""
    model: dict[str, Any]
    """config.json."""

    @staticmethod
    def of(folder: Path) -> _Described:
        """Read the files; raises ModelLoadError for a file that cannot be read."""
        said = read_json(folder / CONFIG_FILE)
        versions = said.get("fast_tokenizer_files")
        if isinstance(versions, list) and (others := [each for each in versions if each != TOKENIZER_FILE]):
            raise ModelLoadError(
                f"{folder / CONFIG_FILE} names {others[0]!r:.100} as the tokenizer of some versions of transformers; "
                f"Baton reads {TOKENIZER_FILE}: remove fast_tokenizer_files"
            )
        if said.get("split_special_tokens"):
            raise ModelLoadError(
                f"{folder / CONFIG_FILE} has split_special_tokens, which would make the special tokens of chats text; "
                "remove it"
            )
        model = read_json(folder / "config.json")
        name = class_of(folder, model, said, lambda: b'"ByteLevel"' in _content(folder / TOKENIZER_FILE))
        is_legacy = "added_tokens_decoder" not in said
        if is_legacy:
            said = said | read_json(folder / MAP_FILE)
        return _Described((dict(BUILT[name].tokens) if name else {}) | said, is_legacy, name, model)

    @property
    def further(self) -> Any:
        """Return special tokens without standard names: a list, or an object by their names."""
        if self.class_name and not {"extra_special_tokens", "additional_special_tokens"} & self.said.keys():
            return list(BUILT[self.class_name].further)
        return self.said.get("extra_special_tokens") or self.said.get("additional_special_tokens") or []

    @property
    def named(self) -> dict[str, AddedToken]:
        """Return special tokens by the names that chat templates use. Raises ValueError for an invalid token."""
        named = {name: self.said.get(name) for name in SPECIAL_NAMES}
        named |= {n: value for n, value in self.said.items() if n.endswith("_token") and isinstance(value, str)}
        named |= self.further if isinstance(self.further, dict) else {}
        return {name: _token(value, special=True) for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _AddedTokens:
    """Tokens that a folder's files add to the vocabulary."""

    special: list[AddedToken]
    """Special tokens: first those that have a name, such as `eos_token`."""
    listed: dict[int, AddedToken]
    """Tokens by the ids that a list gives them."""
    num_named: int
    """Number of special tokens that have a name."""


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model's folder with all added tokens. It neither truncates nor pads.

    Raises:
        ModelLoadError: tokenizer.json is missing, a file cannot be read or is rejected, or two files disagree.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelLoadError(f"The model folder {folder} has no {TOKENIZER_FILE}.")
    described = _Described.of(folder)
    try:
        file = json.loads(_content(path).decode())
        _check(file)
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}") from error
    added = _added_tokens(folder, described, file)
    try:
        tokenizer = _made(path, file, described)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add(tokenizer, added)
        fix_words(tokenizer, described.model, described.said)
        if described.class_name:
            finish(described.class_name, tokenizer, described.said, [token.content for token in added.special])
    except BaseException as error:  # the library raises no narrower class
        raise ModelLoadError(f"Cannot read {path}: {complaint_of(error)}") from error
    _require_one_id(folder, tokenizer, added, file, described)
    return tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the tokenizer's special tokens, by the names that chat templates use.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    try:
        return {name: token.content for name, token in _Described.of(folder).named.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {folder / CONFIG_FILE}: {error}") from error


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the text of each token of a model's tokenizer, with its id; empty: it has no tokenizer.json.

    Raises:
        ModelLoadError: as in `read_tokenizer`.
    """
    return read_tokenizer(folder).get_vocab() if (folder / TOKENIZER_FILE).is_file() else {}


def end_of_sequence_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of the end-of-sequence tokens.

    They are those of generation_config.json, else of config.json, and the tokenizer's `eos_token`. A negative id stands
    for no token. A chat model may have two, for the end of a text and of a turn. Folders often name one in the
    configuration, and the other one in the tokenizer.

    Raises:
        ModelLoadError: a file cannot be read, or names something other than token ids.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        said = of_text(read_json(folder / name), "eos_token_id")
        ids = [whole(each) for each in (said if isinstance(said, list) else [] if said is None else [said])]
        if not all(type(token_id) is int for token_id in ids):
            raise ModelLoadError(f"{folder / name} names {said!r} as eos_token_id; it must be a token id or several.")
        if ids:
            break
    text = special_tokens(folder).get("eos_token")
    if text is not None and (own := read_vocabulary(folder).get(text)) is not None:
        ids = [*ids, own]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))


def _content(path: Path) -> bytes:
    """Return the contents of a file.

    Raises OSError or ValueError for a file that cannot be read, is too long, or was not fetched.
    """
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"it has {size} bytes, more than {MAX_FILE_BYTES}")
    content = read_plain(path, size)
    if content.startswith(LFS_POINTER):
        raise ValueError(NOT_FETCHED)
    return content


def _made(path: Path, file: dict[str, Any], described: _Described) -> tokenizers.Tokenizer:
    """Return the tokenizer without the additions of other files."""
    if not described.class_name:
        return tokenizers.Tokenizer.from_file(str(path))
    otherwise = advice(described.model)
    tokenizer = build(described.class_name, file, described.said, otherwise)
    if replaced := replaced_parts(tokenizer, file):
        warn_once(
            f"{path} is read as transformers reads it, by {described.class_name}, which has another "
            f"{' and '.join(replaced)} than the file: {otherwise}"
        )
    return tokenizer


def _added_tokens(folder: Path, described: _Described, file: dict[str, Any]) -> _AddedTokens:
    """Return the added tokens. Raises ModelLoadError for a file that cannot be read, or that has an invalid token."""
    path = folder / CONFIG_FILE
    said, listed = described.said, dict[int, AddedToken]()
    try:
        if not described.is_legacy:
            listed = {int(name): _token(value) for name, value in (said.get("added_tokens_decoder") or {}).items()}
        elif (folder / MAP_FILE).is_file():
            path = folder / MAP_FILE
        named, further = described.named, described.further
        if "pad_token" not in said and (padding := file.get("padding")):
            named.setdefault("pad_token", AddedToken(padding["pad_token"], special=True))
        special = list(named.values())
        special += [_token(value, special=True) for value in further] if isinstance(further, list) else []
        if described.is_legacy:
            path = folder / ADDED_FILE
            texts = {token.content for token in special}
            for text, token_id in read_json(path).items():
                is_special = text in texts
                listed[int(token_id)] = AddedToken(text, normalized=not is_special, special=is_special)
            path = folder / TOKENIZER_FILE
            own = {int(each["id"]): _token(each) for each in file.get("added_tokens") or ()}
            for token_id in listed.keys() & own.keys():
                if (text := listed[token_id].content) != own[token_id].content:
                    raise ValueError(
                        f"it gives the id {token_id} to {own[token_id].content[:100]!r}, and {ADDED_FILE} "
                        f"to {text[:100]!r}; correct the file that is wrong"
                    )
            listed |= own
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}") from error
    return _AddedTokens(special, dict(sorted(listed.items())), len(named))


def _require_one_id(
    folder: Path, tokenizer: tokenizers.Tokenizer, added: _AddedTokens, file: dict[str, Any], described: _Described
) -> None:
    """Raise ModelLoadError if two files give one token different ids, or only one of them makes it special."""
    list_file = ADDED_FILE if described.is_legacy else CONFIG_FILE
    own = {i: token for token in file.get("added_tokens") or () if type(i := dict(token).get("id")) is int}
    for token_id, token in added.listed.items():
        in_file = (own.get(token_id) or {}).get("content") == token.content
        if (found := tokenizer.token_to_id(token.content)) != token_id and not in_file:
            raise ModelLoadError(
                f"{folder} gives the token {token.content[:100]!r} two ids: {list_file} says {token_id}, "
                f"and by {TOKENIZER_FILE} it is {found}; correct the file that is wrong"
            )
    if not described.class_name:
        return
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in own.items():
        text = str(token.get("content"))
        if (found := tokenizer.token_to_id(text)) != token_id or (token.get("special") and text not in known):
            why = "lacks it" if found is None else "has it, but not as special" if found == token_id else f"has {found}"
            raise ModelLoadError(
                f"{folder / TOKENIZER_FILE} has the added token {text[:100]!r} with the id {token_id}; transformers' "
                f"{described.class_name} {why}, because it adds only the tokens that {list_file} lists; list the token "
                f"in {list_file}; {advice(described.model)}"
            )


def _token(value: Any, *, special: bool = False) -> AddedToken:
    match value:
        case str():
            return AddedToken(value, special=special)
        case {"content": str(content)}:
            special = special or bool(value.get("special", False))
            flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
            return AddedToken(content, special=special, normalized=bool(value.get("normalized", not special)), **flags)
    raise ValueError(f"{value!r:.100} is no token")


def _add(tokenizer: tokenizers.Tokenizer, added: _AddedTokens) -> None:
    """Add the tokens that the tokenizer lacks, in transformers' order, which determines their ids."""
    names = {token.content for token in added.special[: added.num_named]}
    tokens = list(added.listed.values())
    known = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *tokens)}
    for token in added.special:
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    for token in tokens:
        token.special = token.special or token.content in names
    _check_added([(token.content, token.special) for token in tokens])
    tokenizer.add_tokens(tokens)


def _check(file: dict[str, Any]) -> None:
    """Raise ValueError for a rejected tokenizer. A file that is not a tokenizer at all is left to the library."""
    _check_ids(file)
    added = [token for token in file.get("added_tokens") or () if isinstance(token, dict)]
    _check_added([(str(token.get("content")), bool(token.get("special"))) for token in added])
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth, num_added = 1, 0
        for step in _steps(file.get(name)):
            growth *= _growth(step) if step.get("type") == "Replace" else 1
            num_added += len(str(step.get("prepend") or "")) + len(str(step.get("replacement") or ""))
        if growth > MAX_GROWTH or num_added > MAX_ADDED:
            raise ValueError(f"its {name} lets texts grow too much")
    for step in _steps(file.get("post_processor")):
        pieces = [*(step.get("single") or ()), *(step.get("pair") or ())]
        tokens = step.get("special_tokens") or {}
        ids = [len(token.get("ids") or ()) for token in tokens.values() if isinstance(token, dict)]
        if len(pieces) * max(ids, default=1) > MAX_ADDED:
            raise ValueError("its post_processor puts too many tokens around a text")


def _check_ids(file: dict[str, Any]) -> None:
    """Raise ValueError for ids far beyond the number of tokens, because the library fills the gaps."""
    model = file.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    own = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids = [*own, *(token.get("id") for token in file.get("added_tokens") or () if isinstance(token, dict))]
    highest = max((each for each in ids if type(each) is int), default=0)
    if highest > (most := 2 * len(ids) + MAX_HOLES):
        raise ValueError(f"a token has the id {highest}, and of {len(ids)} tokens none may have more than {most}")


def _check_added(tokens: Sequence[tuple[str, bool]]) -> None:
    """Raise ValueError for added tokens that are too long, or for too many special tokens."""
    longest = max((len(text) for text, _ in tokens), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"an added token has {longest} characters, more than {MAX_TOKEN_CHARACTERS}")
    num_special = sum(is_special for _, is_special in tokens)
    if num_special > MAX_SPECIAL:
        raise ValueError(f"it has {num_special} special tokens, more than {MAX_SPECIAL}")
    if sum(len(text) ** 2 for text, is_special in tokens if is_special) > MAX_SEARCHED_CHARACTERS:
        raise ValueError("its special tokens are too many and too long")


def _growth(step: dict[str, Any]) -> int:
    """Return the factor by which a replacement may lengthen a text. A regular expression may match nothing."""
    content, pattern = len(str(step.get("content") or "")), step.get("pattern")
    text = str(pattern.get("String") or "") if isinstance(pattern, dict) else ""
    return max(1, -(-content // len(text)) if text else content + (content > 0))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of the tokenizer, which may be nested sequences of them."""
    if not isinstance(part, dict):
        return
    yield part
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        for step in part.get(name) or ():
            yield from _steps(step)
