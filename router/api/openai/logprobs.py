"""Writes the log probabilities of the completions endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from baton.api import PromptScores
from baton.scores import TokenScores
from router.prompt import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def of_chat(token_ids: Sequence[int], scores: TokenScores, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field `logprobs` of a chat's choice."""
    content = []
    for index, token_id in enumerate(token_ids):
        top = [_token(top_id, logprob, tokenizer) for top_id, logprob in scores.top(index)]
        content.append({**_token(token_id, scores.logprobs[index], tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Writer of the field `logprobs` of a completion's choice, piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder("replace")
        self._num_characters = 0

    def prompt(self, prompt: PromptScores) -> dict[str, list[Any]]:
        """Return the field for an echoed prompt. Call this before the first piece. The first token has no score."""
        first = self.piece(prompt.token_ids[:1], TokenScores((0.0,)))
        rest = self.piece(prompt.token_ids[1:], prompt.scores)
        return joined({**first, "token_logprobs": [None], "top_logprobs": [None]}, rest)

    def piece(self, token_ids: Sequence[int], scores: TokenScores) -> dict[str, list[Any]]:
        """Return the field for the tokens that follow the earlier pieces."""
        offsets, tops = [], []
        for index, token_id in enumerate(token_ids):
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            best = {self._key(top_id): logprob for top_id, logprob in reversed(scores.top(index))}
            tops.append({self._key(token_id): scores.logprobs[index], **best} if best else {})
        return {
            "text_offset": offsets,
            "token_logprobs": list(scores.logprobs),
            "tokens": [self._key(token_id) for token_id in token_ids],
            "top_logprobs": tops,
        }

    def _key(self, token_id: int) -> str:
        """Return a token in OpenAI's format; if it is not valid UTF-8 alone, its bytes in hexadecimal."""
        written = self._tokenizer.token_bytes(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def joined(*pieces: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the field for the tokens of several pieces."""
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}


def of_prompt(prompt: PromptScores, tokenizer: Tokenizer) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's field `prompt_logprobs`.

    It has, for each token except the first, the token's log probability and those of the likeliest tokens.
    """
    found: list[dict[str, dict[str, Any]] | None] = [None]
    for index, token_id in enumerate(prompt.token_ids[1:]):
        tops = {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(prompt.scores.top(index), 1)}
        every = {token_id: (prompt.scores.logprobs[index], None)} | tops
        found.append(
            {
                str(each): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.decode([each])}
                for each, (logprob, rank) in every.items()
            }
        )
    return found


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    written = tokenizer.token_bytes(token_id)
    return {"token": written.decode(errors="replace"), "logprob": logprob, "bytes": list(written)}
