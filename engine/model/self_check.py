"""The last net under wrong tokens: the loaded model must give the logits that its own attention gives, without a cache.

Fifty tokens are computed at once by transformers' own attention, and here as a worker computes them: in two chunks and
one by one, with all block tables. A model whose layers keep something that `asking` does not see is refused here. In
float32 small differences show; in narrow data types only gross ones differ from the rounding of a deep model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from baton.blocks import num_blocks_for
from baton.errors import ModelLoadError, in_one_line
from baton.sampling import SamplingParams
from engine.core.kv_spec import EMPTY_PLACE, BlockTables, KVSpec
from engine.core.runner import StepPart
from engine.model.rank_step import RankStep

NUM_TOKENS = 50
ENDS = (24, 47, 48, 49, 50)
"""Ends of the parts in which the tokens are computed: two chunks, then one by one."""
WHOLE_ENDS = ENDS[1:]
"""The same with one chunk, for models whose layers lose their state between chunks."""
OWN_ATTENTION = ("sdpa", "eager")
"""Transformers' own attentions, in the order in which they are tried: some models have only the last one."""
TOLERANCE = 0.01
"""Largest accepted difference of a token's logits: its mean square as a share of their variation, both as roots."""
ROUNDED_TOLERANCE = 0.5
"""Largest accepted difference with narrow data types, whose rounding grows with the number of layers; two unrelated
computations give 1.4. The medians of all tokens and of the first ones of parts count here, since rounding may choose
another expert."""
NO_SAMPLING = SamplingParams(temperature=0.0)


def probe_tokens(vocab_size: int, max_tokens: int) -> list[int]:
    """Return the tokens that are computed, at most `max_tokens`."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[int] = torch.randint(vocab_size, (min(NUM_TOKENS, max_tokens),), generator=generator).tolist()
    return [vocab_size - 1, *drawn[1:]]  # a model may have a second embedding, and a smaller one


def require_equal(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, model_type: str) -> None:
    """Compare the logits of all tokens, `[tokens, vocabulary]`, with those of the model's own attention.

    Args:
        dtype: data type of the computation and of the pages.

    Raises:
        ModelLoadError: they differ.
    """
    found, expected = found.float().cpu(), expected.float().cpu()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
    shares = ((found - expected).norm(dim=-1) / spread).nan_to_num(torch.inf)
    tolerance, difference = TOLERANCE, shares.max()
    if dtype.itemsize < 4:
        firsts = shares[[end for end in ENDS if end < len(shares)]]
        tolerance, difference = ROUNDED_TOLERANCE, max(shares.median(), firsts.median())
    if not difference <= tolerance:
        raise ModelLoadError(
            f"models of type {model_type!r} are not supported: over the KV cache this model's logits "
            f"differ from those of its own attention by a share of {float(difference):.2g}"
        )


@torch.inference_mode()
def own_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the logits of all tokens by transformers' own attention without a cache, `[tokens, vocabulary]`."""
    ours, failure = model.config.get_text_config(decoder=True)._attn_implementation, ""
    for name in OWN_ATTENTION:
        try:
            model.set_attn_implementation(name)
            given = torch.tensor([token_ids], device=model.device)
            logits: torch.Tensor = model(input_ids=given, use_cache=False).logits[0]
            return logits
        except Exception as error:  # a model without this one, or its own code
            failure = in_one_line(error)
        finally:
            model.set_attn_implementation(ours)
    raise ModelLoadError(f"transformers' own attention cannot compute this model: {failure}")


def steps(token_ids: list[int], spec: KVSpec, ends: Sequence[int] = ENDS) -> Iterator[RankStep]:
    """Yield steps that compute the tokens part by part; each needs the logits of all its tokens.

    Args:
        ends: ends of the parts.
    """
    begin = 0
    for number, end in enumerate(sorted({min(end, len(token_ids)) for end in ends})):
        part = StepPart(
            sequence_key=-1,
            token_ids=tuple(token_ids[begin:end]),
            num_computed_tokens=begin,
            block_ids=tables_of(spec, end, number),
            num_kv_tokens=(end,) * spec.num_tables,
            sample=False,
            is_decoding=end - begin == 1,
            sampling=NO_SAMPLING,
            choice_index=0,
            num_prompt_tokens=len(token_ids),
        )
        yield RankStep([part], [], num_scored=[end - begin])
        begin = end


def tables_of(spec: KVSpec, num_tokens: int, step: int) -> BlockTables:
    """Return the tables of the only sequence in a cache, which holds `num_tokens` tokens after its step of this number.

    If there are states, two of their rows take turns.
    """
    tables = tuple(tuple(range(num_blocks_for(num_tokens, group.block_size))) for group in spec.groups)
    rows = ((1 - step % 2 if step else EMPTY_PLACE, step % 2),) if spec.states else ()
    return (*tables, *rows)
