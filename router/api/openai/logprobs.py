"""How the completions endpoints write log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.scores import TokenScores
from router.prompt import Tokenizer


def of_chat(token_ids: Sequence[int], scores: TokenScores, tokenizer: Tokenizer) -> dict[str, Any]:
    """The field `logprobs` of a chat's choice."""
    content = []
    for index, token_id in enumerate(token_ids):
        top = [_token(top_id, logprob, tokenizer) for top_id, logprob in scores.top(index)]
        content.append({**_token(token_id, scores.logprobs[index], tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_completion(
    token_ids: Sequence[int], scores: TokenScores, tokenizer: Tokenizer, offset: int
) -> dict[str, list[Any]]:
    """The field `logprobs` of a completion's choice.

    Args:
        token_ids: the tokens.
        scores: theirs.
        tokenizer: the model's.
        offset: characters of the tokens before them.
    """
    tokens = [_text(tokenizer.token_bytes(token_id)) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {_text(tokenizer.token_bytes(top_id)): logprob for top_id, logprob in reversed(scores.top(index))}
        for index in range(len(tokens))
    ]
    return {
        "text_offset": offsets,
        "token_logprobs": list(scores.logprobs),
        "tokens": tokens,
        "top_logprobs": tops,
    }


def num_characters(token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Characters of tokens, each written by itself, as offsets count them."""
    return sum(len(_text(tokenizer.token_bytes(token_id))) for token_id in token_ids)


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    written = tokenizer.token_bytes(token_id)
    return {"token": _text(written), "logprob": logprob, "bytes": list(written)}


def _text(written: bytes) -> str:
    """U+FFFD stands for bytes that are no whole character."""
    return written.decode(errors="replace")
