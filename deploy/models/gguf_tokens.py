"""Kinds of tokens in a GGUF file's vocabulary: `tokenizer.ggml.token_type`."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

NORMAL = 1
CONTROL = 3
"""Text such as <|im_end|> that is one token and never shown."""
USER_DEFINED = 4
"""Text that is one token wherever it occurs, such as <table> or thirty spaces."""


def add_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int], *, found_normalized: bool = False
) -> None:
    """Add the control tokens and the user-defined tokens.

    Args:
        found_normalized: whether user-defined tokens are found in normalized text; otherwise in the text as given.
    """
    of = list(zip(tokens, kinds, strict=True))
    # Each call takes as long as there are such tokens: one for all of a kind.
    special = [AddedToken(token, normalized=False, special=True) for token, kind in of if kind == CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=found_normalized, special=False) for token, kind in of if kind == USER_DEFINED]
    )
