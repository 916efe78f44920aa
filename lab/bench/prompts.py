"""Token ids for the prompts of a trace, which contains only the ids of shared blocks."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.traces.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Prompts:
    """Generates prompts in which equal block ids give equal tokens, on every machine.

    Tokens are SHAKE-128 of seed and id, 32 bits each, modulo `vocab_size`. Some may be special tokens of a model, which
    does not affect its costs. Another seed gives prompts that no cache contains.
    """

    seed: int
    vocab_size: int
    block_tokens: int

    def token_ids(self, number: int, request: TraceRequest) -> list[int]:
        """Return the tokens of the blocks, followed by those of the rest, which are unique to this request.

        Args:
            number: index of the request in its trace.
        """
        token_ids: list[int] = []
        for block in request.block_ids:
            token_ids += self._tokens(f"block {block}", self.block_tokens)
        return token_ids + self._tokens(f"request {number}", request.num_prompt_tokens - len(token_ids))

    def _tokens(self, name: str, count: int) -> list[int]:
        drawn = shake_128(f"baton bench {self.seed} {name}".encode()).digest(4 * count)
        return [number % self.vocab_size for number in struct.unpack(f"<{count}I", drawn)]
