"""How the completions endpoints write log probabilities."""

from __future__ import annotations

import codecs
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


class CompletionLogprobs:
    """Writes the field `logprobs` of a completion's choice, one piece after the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def piece(self, token_ids: Sequence[int], scores: TokenScores) -> dict[str, list[Any]]:
        """The field for tokens that follow those of the pieces before."""
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
        """A token as OpenAI writes it here: what is no whole characters by its bytes, in hexadecimal."""
        written = self._tokenizer.token_bytes(token_id)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    written = tokenizer.token_bytes(token_id)
    return {"token": written.decode(errors="replace"), "logprob": logprob, "bytes": list(written)}
