"""Tokenizer of one model, with the limits and defaults that the model's folder states."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from baton.api import Chat
from baton.errors import InvalidRequest, ModelLoadError
from baton.model_files import decoder_start_ids, denoises, of_text, read_json, unapplied_recommendations, whole
from baton.rust import complaint_of
from baton.sampling import SamplingParams
from baton.tokenizer_file import end_of_sequence_ids, read_tokenizer, special_tokens
from router.prompt.chat import ChatTemplate
from router.prompt.literal import LiteralEncoder, SegmentEncoder, encode_batch

logger = logging.getLogger(__name__)
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
IMAGE_TOKEN_NAMES = ("image_token_id", "image_token_index")
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
"""Name in generation_config.json -> name in `SamplingParams`."""
BLOCK = 64
"""Number of tokens whose texts are decoded together."""


class ChatDraft(NamedTuple):
    """A chat that the template has not rendered yet."""

    question: bytes
    """Input of the process that renders it."""
    mark: str | None
    """Character that marks special tokens in the client's texts; None: the texts have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """The tokenizer of one model, with the limits and defaults that its folder states."""

    folder: Path
    """The model's folder."""
    chat_template: ChatTemplate
    vocab_size: int
    """One more than the highest token id."""
    special_ids: frozenset[int]
    """Special tokens such as <|im_end|>, which have no text."""
    eos_ids: tuple[int, ...]
    """Tokens that end an answer."""
    decoder_start_ids: tuple[int, ...]
    """Tokens that follow a prompt that an encoder reads; empty: the model has no encoder."""
    max_model_len: int
    """Context window of the model in tokens (prompt and answer); 0: the model does not declare it."""
    longest_token: int
    """Length in characters of the longest vocabulary entry: no token stands for more text."""
    default_sampling: SamplingParams
    """Sampling parameters that the model's authors recommend; the others are neutral."""
    _added_ids: frozenset[int]
    """Added tokens, whose spelling in the vocabulary is their text."""
    _is_byte_level: bool
    """True if the spelling of the other tokens uses GPT-2's printable characters for bytes."""
    _tokenizer: tokenizers.Tokenizer
    _segments: SegmentEncoder
    _literal: LiteralEncoder
    _texts: TokenTexts

    @staticmethod
    def load(folder: Path, chat_template: str = "") -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

        A warning names the recommendations in generation_config.json that this version does not apply.

        Args:
            chat_template: path of a file with the chat template; empty: the folder's own template.

        Raises:
            ModelLoadError: tokenizer.json or config.json is missing, or a file cannot be read.
        """
        tokenizer = read_tokenizer(folder)
        vocabulary = tokenizer.get_vocab()
        config = read_json(folder / "config.json", required=True)
        tokenizer_config = read_json(folder / "tokenizer_config.json")
        template = ChatTemplate.load(folder, tokenizer_config, special_tokens(folder), chat_template)
        generation = read_json(folder / "generation_config.json")
        unapplied = unapplied_recommendations(folder)
        if denoises(folder):  # workers refuse these parameters, and the draws follow the file's schedule instead
            of_draws = {name: generation.pop(name, None) for name in RECOMMENDED_SAMPLING}
            unapplied |= {name: value for name, value in of_draws.items() if value is not None}
        if unapplied:
            logger.warning(
                "%s recommends %s, which this version does not apply: answers may differ from those that the model's "
                "authors intended",
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
            decoder_start_ids=decoder_start_ids(folder),
            max_model_len=next((int(value) for name in LENGTH_NAMES if (value := of_text(config, name))), 0),
            default_sampling=_default_sampling(generation, frozenset(vocabulary.values())),
            _added_ids=frozenset(tokenizer.get_added_tokens_decoder()),
            _is_byte_level='"ByteLevel"' in tokenizer.decoder.__getstate__().decode() if tokenizer.decoder else False,
            _tokenizer=tokenizer,
            _segments=SegmentEncoder(tokenizer),
            _literal=_literal_encoder(tokenizer, template, _image_tokens(config)),
            _texts=TokenTexts(functools.partial(tokenizer.decode_batch, skip_special_tokens=False)),
        )

    def encode(self, text: str, *, parse_special: bool = False, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a plain-text prompt, with the special tokens that the model adds (for example BOS).

        Args:
            parse_special, add_special_tokens: see `baton.api.Text`.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        if parse_special:
            return encode_batch(self._tokenizer, [text], add_special_tokens=add_special_tokens)[0]
        return self._literal.encode(text, add_special_tokens=add_special_tokens)

    def draft_chat(self, chat: Chat) -> ChatDraft:
        """Return the input for the template, which renders the chat up to the start of the assistant's next message.

        Raises:
            InvalidRequest: there is no template, or it does not support the messages.
        """
        context = self.chat_template.context(chat)
        marked = None if chat.parse_special else self._literal.mark(context)
        if marked is None:
            return ChatDraft(self.chat_template.question(context), None)
        return ChatDraft(self.chat_template.question(marked.context), marked.mark)

    def encode_written(self, text: str, *, mark: str | None, scope: str) -> list[int]:
        """Return the token ids of a rendered chat, including special tokens.

        Args:
            text: the template's output for a draft.
            mark: the mark of the draft.
            scope: the tenant's cache scope; segments that were encoded for it are reused.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        if mark is not None:
            return self._literal.encode_marked(text, mark)
        return self._segments.encode(text, scope)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text, without special tokens and ids outside the vocabulary.

        U+FFFD replaces bytes that are not valid UTF-8.
        """
        return self._decoded(token_ids, skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text like `decode`, but including special tokens."""
        return self._decoded(token_ids, skip_special_tokens=False)

    def _decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise ModelLoadError(f"the model's tokenizer cannot decode an answer: {complaint_of(error)}") from error

    def text_of(self, token_id: int) -> str:
        """Return the result of `decode_all` for one token, from a cache."""
        return self._texts.of(token_id)

    def encode_fragment(self, text: str) -> list[int]:
        """Return the token ids of a text in the middle of other text, without added special tokens.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        return encode_batch(self._tokenizer, [text], add_special_tokens=False)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character; b"" outside the vocabulary."""
        spelling = self.token(token_id)
        if token_id in self._added_ids:
            return spelling.encode()
        if self._is_byte_level:
            return b"".join(_BYTE_OF.get(letter, letter.encode()) for letter in spelling)
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes.fromhex(spelling[3:5])
        return spelling.replace("\u2581", " ").encode()

    def token(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token; "" outside the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""


def _image_tokens(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the placeholders of images in a model's config.json."""
    return frozenset(value for name in IMAGE_TOKEN_NAMES if type(value := config.get(name)) is int)


def _literal_encoder(
    tokenizer: tokenizers.Tokenizer, template: ChatTemplate, image_tokens: Collection[int]
) -> LiteralEncoder:
    try:
        return LiteralEncoder(tokenizer, template.words, template.names, image_tokens)
    except BaseException as error:  # copying the tokenizer and normalizing texts may panic in Rust
        raise ModelLoadError(f"the model's tokenizer cannot be used: {complaint_of(error)}") from error


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's printable character of each byte: printable bytes map to themselves, others from U+0100 on."""
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
        raise ModelLoadError(f"the model's generation_config.json recommends invalid values: {error}") from error


def _number(generation: Mapping[str, Any], name: str) -> Any:
    """Return a recommended number, or None. Whole numbers may be written like 50.0.

    Raises:
        ModelLoadError: the value is not a valid number.
    """
    value, is_whole = generation.get(name), name in _WHOLE_NUMBERS
    if value is None or name == "bad_words_ids":
        return value
    value = whole(value) if is_whole else value
    if type(value) is not int and (is_whole or not isinstance(value, float)):
        raise ModelLoadError(
            f"the model's generation_config.json recommends invalid values: {value!r:.100} as {name}, which must be a "
            f"{'whole ' if is_whole else ''}number"
        )
    return value


class TokenTexts:
    """Memory-efficient cache of the texts of single tokens, in blocks of neighbouring token ids.

    A block is decoded together, and stored as one string: a string per token would take 50 bytes more, and requests
    with log probabilities soon use the whole vocabulary.

    Args:
        decode: returns the texts of several sequences.
    """

    def __init__(self, decode: Callable[[Sequence[Sequence[int]]], Sequence[str]]) -> None:
        self._decode = decode
        self._blocks: dict[int, tuple[str, array[int]]] = {}
        """Block number -> the concatenated texts, and their start offsets followed by the end of the last text."""

    def of(self, token_id: int) -> str:
        """Return a token's text."""
        number, place = divmod(token_id, BLOCK)
        text, begins = self._blocks.get(number) or self._read(number)
        return text[begins[place] : begins[place + 1]]

    def _read(self, number: int) -> tuple[str, array[int]]:
        texts = self._decode([(token_id,) for token_id in range(BLOCK * number, BLOCK * (number + 1))])
        self._blocks[number] = block = "".join(texts), array("I", itertools.accumulate(map(len, texts), initial=0))
        return block
