"""SentencePiece's BPE, as Gemma has it, out of the tokens, scores and kinds of a GGUF file.

SentencePiece joins the two neighbours whose joint text has the highest score; tokenizers joins the two that come first
in a list. So the list has each way to cut a token into two, ordered by the token's score. transformers makes the same
list (`generate_merges`) from a SentencePiece file; it takes minutes to build its tokenizer from 262,144 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, normalizers, processors

from baton.errors import ModelLoadError
from deploy.models.gguf_metadata import Metadata
from deploy.models.gguf_tokens import NORMAL, USER_DEFINED, add_tokens

SPACE = "\u2581"
"""SentencePiece's mark for a space. llama.cpp writes a space instead in user-defined tokens."""


def sentencepiece(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer. Raises ModelLoadError if the model wants a space before the text."""
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise ModelLoadError("The GGUF file's tokenizer adds a space before the text; only one that does not is known.")
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    tokens = [
        token.replace(" ", SPACE) if kind == USER_DEFINED else token
        for token, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True)
    ]
    scores = {
        token: score
        for token, score, kind in zip(tokens, metadata["tokenizer.ggml.scores"], kinds, strict=True)
        if kind == NORMAL
    }
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    model = models.BPE(vocabulary, merges(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    add_tokens(tokenizer, tokens, kinds, found_normalized=True)
    if metadata.get("tokenizer.ggml.add_bos_token", True):
        first_id = metadata["tokenizer.ggml.bos_token_id"]
        first = tokens[first_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, first_id)]
        )
    return tokenizer


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token: those of a high score first, of one token the longest left part."""

    def pairs(token: str) -> Iterator[tuple[str, str]]:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                yield left, right

    # Sorting is stable, so tokens of one score stay in their order.
    return [pair for token in sorted(scores, key=lambda token: -scores[token]) for pair in pairs(token)]
