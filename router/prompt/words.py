"""Converts texts in sampling parameters to token ids, because workers handle only token ids."""

from __future__ import annotations

from dataclasses import replace

from baton.errors import InvalidRequest
from baton.sampling import DRY_BREAKERS, MAX_BAD_WORD_TOKENS, SamplingParams
from router.prompt.tokenizer import Tokenizer


def in_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters with token ids in place of texts. Stop strings stay, because the router matches them.

    Raises:
        InvalidRequest: a text is not valid Unicode, or a bad word has too many tokens.
    """
    if params.bad_words:
        words = [ids for word in params.bad_words for ids in _spellings(word, tokenizer)]
        params = replace(params, bad_words=(), bad_word_ids=tuple(dict.fromkeys((*params.bad_word_ids, *words))))
    if params.dry_multiplier:
        # The last token of a breaker after other text, as in text-generation-webui.
        last = [tokenizer.encode_fragment(f"a{breaker}")[-1] for breaker in params.dry_sequence_breakers]
        breakers = tuple(dict.fromkeys((*params.dry_breaker_ids, *last)))
        params = replace(params, dry_sequence_breakers=DRY_BREAKERS, dry_breaker_ids=breakers)
    if params.xtc_probability and not params.xtc_exempt_token_ids:
        params = replace(params, xtc_exempt_token_ids=tuple(tokenizer.encode_fragment("\n")[-1:]))
    return params


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the start of a text and after a space; white space is encoded unchanged."""
    texts = [prefix + word.lstrip() for prefix in ("", " ")] if word.strip() else [word]
    spellings = [tuple(tokenizer.encode_fragment(text)) for text in texts]
    if any(len(ids) > MAX_BAD_WORD_TOKENS for ids in spellings):
        raise InvalidRequest(
            f"sampling.bad_words must be texts of at most {MAX_BAD_WORD_TOKENS} tokens; shorten the one that starts "
            f"with {word[:20]!a}",
            "bad_words",
        )
    return spellings
