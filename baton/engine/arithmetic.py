"""A model whose answers can be worked out by hand, with a real KV cache.

    next token = (sum over positions p of (p + 1) * token_p  +  state) mod vocab_size

K holds the token and V holds (p + 1) * token, in two layers; `state`, if there is one, is the running sum of all
tokens. The answer comes from K of the first layer, plus one for every place where another page says otherwise. So a
block that is lost, stale, swapped or altered, in any layer, changes the answer, as with a real model, and tests of
scheduling, hand-over and streaming need no weights.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup, StateSpec
from baton.engine.scheduler import Batch, Scheduled

NUM_LAYERS = 2


class ArithmeticRunner:
    """See the module's docstring. End of sequence never comes by itself: token 0 is the only end token."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        vocab_size: int = 49152,
        max_model_len: int = 8192,
        max_num_seqs: int = 64,
        with_state: bool = False,
        eos_token_ids: frozenset[int] = frozenset({0}),
    ) -> None:
        states = (StateSpec("token_sum", (1,), torch.int64),) if with_state else ()
        spec = KVSpec(block_size, (LayerGroup("all", tuple(range(NUM_LAYERS)), 1, 1, 1, torch.int64),), states)
        self.cache = KVCache(spec, num_blocks, 2 * max_num_seqs)
        self.vocab_size = vocab_size
        self.max_model_len = min(max_model_len, num_blocks * block_size)
        self.eos_token_ids = eos_token_ids

    def execute(self, batch: Batch) -> list[int]:
        return [token for part in batch if (token := self._compute(part)) is not None]

    def _compute(self, part: Scheduled) -> int | None:
        block_size = self.cache.spec.block_size
        blocks = torch.tensor(part.block_table)
        for layer in range(NUM_LAYERS):
            pages = self.cache.layer(layer).view(-1, 2, block_size)  # [block, K or V, token]
            for offset, token_id in enumerate(part.token_ids):
                position = part.start + offset
                page = pages[part.block_table[position // block_size]]
                page[0, position % block_size] = token_id
                page[1, position % block_size] = (position + 1) * token_id
        state = 0
        for tensor in self.cache.states.values():
            tensor[part.sequence.state_slot] += sum(part.token_ids)
            state = int(tensor[part.sequence.state_slot])
        if not part.sample:
            return None
        num_tokens = part.start + part.num_tokens
        layers = [self.cache.layer(layer).view(-1, 2, block_size)[blocks].unbind(1) for layer in range(NUM_LAYERS)]
        tokens = layers[0][0].flatten()[:num_tokens]
        weighted = tokens * torch.arange(1, num_tokens + 1)
        num_wrong = 0
        for keys, values in layers:
            num_wrong += int((keys.flatten()[:num_tokens] != tokens).sum())
            num_wrong += int((values.flatten()[:num_tokens] != weighted).sum())
        return (int(weighted.sum()) + num_wrong + state) % self.vocab_size


def expected_tokens(
    prompt: SequenceOf[int], num_tokens: int, vocab_size: int = 49152, with_state: bool = False
) -> list[int]:
    """What `ArithmeticRunner` answers to a prompt, worked out without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        state = sum(tokens) if with_state else 0
        tokens.append((sum((p + 1) * t for p, t in enumerate(tokens)) + state) % vocab_size)
    return tokens[len(prompt) :]
