"""One model's tokenizer, and what its folder says about prompts and answers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from baton.api import Chat
from baton.errors import InvalidRequest, ModelLoadError
from baton.model_files import of_text, read_json, unapplied_recommendations, whole
from baton.rust import complaint_of
from baton.sampling import SamplingParams
from baton.tokenizer_file import end_of_sequence_ids, read_tokenizer, special_tokens
from router.prompt.chat import ChatTemplate
from router.prompt.literal import LiteralEncoder
from router.prompt.segment_cache import SegmentEncoder, encode_batch
from router.prompt.token_texts import TokenTexts

logger = logging.getLogger(__name__)
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
RECOMMENDED_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_word_ids",
}
"""Names in generation_config.json -> our names."""


class ChatDraft(NamedTuple):
    """A chat that a template has still to write."""

    question: bytes
    """What the process gets that renders it."""
    mark: str | None
    """Stands in the client's texts where they could be taken for special tokens; None: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """The tokenizer of one model, with the limits and defaults that its folder states."""

    folder: Path
    """The model's folder."""
    chat_template: ChatTemplate
    vocab_size: int
    """One more than the highest token id."""
    special_ids: frozenset[int]
    """Tokens without text: <|im_end|> and its like."""
    eos_ids: tuple[int, ...]
    """Any of them ends an answer."""
    max_model_len: int
    """Longest prompt + answer in tokens, as the model was trained; 0: the model does not say."""
    longest_token: int
    """Characters of the longest vocabulary entry: no token stands for more text."""
    default_sampling: SamplingParams
    """What the model's authors recommend; what they leave open is neutral."""
    _added_ids: frozenset[int]
    """Tokens that are spelled as their text."""
    _is_byte_level: bool
    """True if other tokens are spelled in GPT-2's stand-ins for bytes."""
    _tokenizer: tokenizers.Tokenizer
    _segments: SegmentEncoder
    _literal: LiteralEncoder
    _texts: TokenTexts

    @staticmethod
    def load(folder: Path, chat_template: str = "") -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

        What the last recommends and this version does not apply is named in the log.

        Args:
            chat_template: a file with the chat template; empty: the folder's own.

        Raises:
            ModelLoadError: tokenizer.json or config.json is missing, or a file cannot be read.
        """
        tokenizer = read_tokenizer(folder)
        vocabulary = tokenizer.get_vocab()
        config = read_json(folder / "config.json", required=True)
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        template = ChatTemplate.load(folder, tokenizer_config, special_tokens(folder), chat_template)
        if unapplied := unapplied_recommendations(folder):
            logger.warning(
                "%s recommends %s, which this version does not apply: answers may differ from those that the model's "
                "authors had in mind",
                folder / "generation_config.json",
                ", ".join(f"{name} {value}" for name, value in unapplied.items()),
            )
        return Tokenizer(
            folder=folder,
            chat_template=template,
            vocab_size=max(vocabulary.values(), default=-1) + 1,
            longest_token=max(map(len, vocabulary), default=1),
            special_ids=frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special),
            eos_ids=end_of_sequence_ids(folder),
            max_model_len=next((int(value) for name in LENGTH_NAMES if (value := of_text(config, name))), 0),
            default_sampling=_default_sampling(
                read_json(folder / "generation_config.json"), frozenset(vocabulary.values())
            ),
            _added_ids=frozenset(tokenizer.get_added_tokens_decoder()),
            _is_byte_level='"ByteLevel"' in tokenizer.decoder.__getstate__().decode() if tokenizer.decoder else False,
            _tokenizer=tokenizer,
            _segments=SegmentEncoder(tokenizer),
            _literal=_literal_encoder(tokenizer, template),
            _texts=TokenTexts(functools.partial(tokenizer.decode_batch, skip_special_tokens=False)),
        )

    def encode(self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True) -> list[int]:
        """A prompt of plain text, with what the model wants around one (BOS for some).

        Args:
            parse_special, add_special_tokens: see `baton.api.Text`.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        if parse_special:
            return encode_batch(self._tokenizer, [text], add_special_tokens=add_special_tokens)[0]
        return self._literal.encode(text, add_special_tokens=add_special_tokens)

    def draft_chat(self, chat: Chat) -> ChatDraft:
        """Return what the template is to write, up to where the assistant's next message begins.

        Raises:
            InvalidRequest: no template, or messages in a form that no template knows.
        """
        context = self.chat_template.context(chat)
        marked = None if chat.parse_special else self._literal.mark(context)
        if marked is None:
            return ChatDraft(self.chat_template.question(context), None)
        return ChatDraft(self.chat_template.question(marked.context), marked.mark)

    def encode_written(self, text: str, *, mark: str | None, scope: str) -> list[int]:
        """The tokens of a chat that the template has written, special tokens among them.

        Args:
            text: what it has made of a draft.
            mark: the draft's.
            scope: whose chat it is: what has been encoded for this scope is not encoded again.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        if mark is not None:
            return self._literal.encode_marked(text, mark)
        return self._segments.encode(text, scope)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; U+FFFD stands for bytes that make no character, special tokens and ids outside the
        vocabulary have none.
        """
        return self._decoded(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text as `decode` does, with that of special tokens."""
        return self._decoded(token_ids, skip_special_tokens=False)

    def _decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise ModelLoadError(f"the model's tokenizer cannot decode an answer: {complaint_of(error)}") from error

    def text_of(self, token_id: int) -> str:
        """Return what `decode_all` does for one token; each is decoded once."""
        return self._texts.of(token_id)

    def encode_fragment(self, text: str) -> list[int]:
        """The tokens of a text that has others around it.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        return encode_batch(self._tokenizer, [text], add_special_tokens=False)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, a part of a character's too; b"" outside the vocabulary."""
        spelling = self.token(token_id)
        if token_id in self._added_ids:
            return spelling.encode()
        if self._is_byte_level:
            return b"".join(_BYTE_OF.get(letter, letter.encode()) for letter in spelling)
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes.fromhex(spelling[3:5])
        return spelling.replace("\u2581", " ").encode()

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling of one token, "" outside the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""


def _literal_encoder(tokenizer: tokenizers.Tokenizer, template: ChatTemplate) -> LiteralEncoder:
    try:
        return LiteralEncoder(tokenizer, template.words, template.names)
    except BaseException as error:  # it copies the tokenizer, and normalizes texts by it
        raise ModelLoadError(f"the model's tokenizer cannot be used: {complaint_of(error)}") from error


def _byte_letters() -> dict[str, int]:
    """GPT-2's printable stand-ins for the bytes: a printable byte is its own, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(0x100)
    return {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}


_BYTE_OF = {letter: bytes([byte]) for letter, byte in _byte_letters().items()}


_WHOLE_NUMBERS = ("top_k", "min_new_tokens")


def _default_sampling(generation: Mapping[str, Any], vocabulary: Collection[int]) -> SamplingParams:
    said = {ours: _number(generation, name) for name, ours in RECOMMENDED_SAMPLING.items()}
    said = {name: value for name, value in said.items() if value is not None}
    try:
        if "bad_word_ids" in said:
            words = tuple(tuple(map(whole, word)) for word in said["bad_word_ids"])
            said["bad_word_ids"] = tuple(word for word in words if all(token_id in vocabulary for token_id in word))
        return dataclasses.replace(SamplingParams(), **said)
    except (InvalidRequest, TypeError) as error:
        raise ModelLoadError(f"The model's generation_config.json recommends invalid values: {error}") from error


def _number(generation: Mapping[str, Any], name: str) -> Any:
    """A recommended number; a whole one may be written as 50.0. Raises ModelLoadError for what is none."""
    value, is_whole = generation.get(name), name in _WHOLE_NUMBERS
    if value is None or name == "bad_words_ids":
        return value
    value = whole(value) if is_whole else value
    if type(value) is not int and (is_whole or not isinstance(value, float)):
        raise ModelLoadError(
            f"The model's generation_config.json recommends invalid values: {value!r:.100} as {name}, which must be a "
            f"{'whole ' if is_whole else ''}number"
        )
    return value
