"""The last check against wrong tokens: a loaded model must compute over the KV cache what it computes without one.

Fifty tokens are computed at once by transformers' own attention, and then as a worker computes them: in two chunks and
one by one, with all block tables. A model whose layers keep something that `asking` does not see is refused here.

Each part of each layer is compared by itself. In the pass by transformers' own attention, the output of each part is
replaced by the one that was computed over the KV cache. So both sides compute each part from the same inputs, and
rounding does not add up over the layers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from baton.blocks import num_blocks_for
from baton.errors import ModelLoadError, in_one_line
from baton.messages import PlacedImage
from baton.sampling import SamplingParams
from engine.core.runner import EMPTY_PLACE, BlockTables, KVSpec, StepPart
from engine.model.rank_step import RankStep
from engine.model.shapes import of_text

NUM_TOKENS = 50
ENDS = (24, 47, 48, 49, 50)
"""Ends of the parts in which the tokens are computed: two chunks, then one by one."""
WHOLE_ENDS = ENDS[1:]
"""Ends with one chunk, for models whose layers lose their state between chunks."""
OWN_ATTENTION = ("sdpa", "eager")
"""Transformers' own attentions, in the order in which they are tried: some models have only the last one."""
TOLERANCE = 0.01
"""Largest accepted difference of a token's output or logits: its norm, divided by the norm of their variation."""
ROUNDED_TOLERANCE = 0.04
"""Largest accepted difference with narrow data types. It limits the median of all tokens and that of the first tokens
of steps, since rounding may choose another expert for some tokens. If the scaling of attention is wrong by a tenth, the
difference is 0.03 to 0.06; rounding of products in bfloat16 gives up to 0.03."""
NUM_EXCEPTED, EXCEPTED_TOLERANCE = 4, 0.25
"""Number of tokens whose attention may differ by more with narrow data types, and the limit for all others. Rounding of
large scores can make a token attend to another one. Wrong sinks or a wrong window also change few tokens, by 0.3 to 1.
"""
NO_SAMPLING = SamplingParams(temperature=0.0)


def probe_tokens(vocab_size: int, max_tokens: int) -> list[int]:
    """Return the tokens that are computed, at most `max_tokens`."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[int] = torch.randint(vocab_size, (min(NUM_TOKENS, max_tokens),), generator=generator).tolist()
    return [vocab_size - 1, *drawn[1:]]  # a model may have a second embedding, and a smaller one


class Parts:
    """Outputs of the layers, of their parts and of the attention in them; see the module's docstring.

    Args:
        model: transformers' model. It is not changed.
    """

    def __init__(self, model: Any) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        for name, module in model.named_modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                numbered = re.match(r".*?\.\d+(?=\.|$)", name)
                above = numbered[0] if numbered else name  # a module may be outside of the list of layers
                layer = model.get_submodule(above)
                self._modules |= {above: layer, name: module}
                self._modules |= {f"{above}.{child}": part for child, part in layer.named_children()}
        self._recorded: dict[str, list[torch.Tensor]] = {}
        self._differences: dict[str, torch.Tensor] = {}

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Record the outputs of the steps that are computed in the context."""
        return self._hooked(lambda name, output: self._recorded.setdefault(name, []).append(output.clone()))

    def given(self) -> contextlib.AbstractContextManager[None]:
        """Compare the outputs of a pass over all tokens with the recorded ones, which then replace them."""
        return self._hooked(self._give)

    def require_equal(self, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, model_type: str) -> None:
        """Check all parts, and the logits of all tokens, `[tokens, vocabulary]`.

        Args:
            found: logits over the KV cache.
            expected: logits by the model's own attention, computed in `given`.
            dtype: data type of the computation and of the pages.

        Raises:
            ModelLoadError: they differ.
        """
        self._differences["the logits"] = shares(found, expected)
        for name, differences in self._differences.items():
            tolerance, difference = TOLERANCE, differences.max()
            if dtype.itemsize < 4:
                firsts = differences[[end for end in ENDS if end < len(differences)]]
                tolerance, difference = ROUNDED_TOLERANCE, max(differences.median(), firsts.median())
                if name in self._modules and hasattr(self._modules[name], "is_causal") and difference <= tolerance:
                    tolerance, difference = EXCEPTED_TOLERANCE, differences.sort().values[-1 - NUM_EXCEPTED :][0]
            if not difference <= tolerance:
                raise ModelLoadError(
                    f"models of type {model_type!r} are not supported: over the KV cache this model computes "
                    f"{name} otherwise than with its own attention, by a share of {float(difference):.2g}"
                )

    def _give(self, name: str, output: torch.Tensor) -> torch.Tensor | None:
        recorded = self._recorded.pop(name, None)
        if recorded is None or (found := torch.cat(recorded, dim=-2)).shape != output.shape:
            return None  # not one output per token
        self._differences[name] = shares(found, output).view(-1, output.shape[-2]).amax(0)
        return found

    @contextlib.contextmanager
    def _hooked(self, use: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
        """Call `use` with the name and the first output of each part, which its result replaces."""

        def hook(name: str, output: Any) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            used = use(name, first) if isinstance(first, torch.Tensor) and first.dim() > 1 else None
            return used if used is None or not isinstance(output, tuple) else (used, *rest)

        with contextlib.ExitStack() as stack:
            for name, module in self._modules.items():
                handle = module.register_forward_hook(lambda module, args, output, name=name: hook(name, output))
                stack.callback(handle.remove)
            yield


def shares(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return each token's difference, `[..., tokens, width]` to `[all tokens]`, on the CPU; infinite instead of NaN."""
    found, expected = (each.float().flatten(0, -2) for each in (found, expected))
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    spread = spread.clamp(min=spread.median().clamp(min=1e-6))
    differences: torch.Tensor = (found - expected).norm(dim=-1) / spread
    return differences.nan_to_num(torch.inf).cpu()


@torch.inference_mode()
def own_pair_logits(model: Any, prompt_ids: list[int], answer_ids: list[int]) -> torch.Tensor:
    """Return the logits of an answer's tokens by a model with an encoder, without a cache, `[tokens, vocabulary]`."""
    given = [torch.tensor([token_ids], device=model.device) for token_ids in (prompt_ids, answer_ids)]
    logits: torch.Tensor = model(input_ids=given[0], decoder_input_ids=given[1], use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def own_logits(model: Any, token_ids: list[int], *, sees: bool = False, **images: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens by transformers' own attention without a cache, `[tokens, vocabulary]`.

    Args:
        sees: whether the model has an encoder for images, which keeps its attention.
        images: inputs of the encoder, and what else the model needs with them.
    """
    ours, failure = model.config.get_text_config(decoder=True)._attn_implementation, ""
    for name in OWN_ATTENTION:
        try:
            model.set_attn_implementation(of_text(model.config, name) if sees else name)
            given = torch.tensor([token_ids], device=model.device)
            logits: torch.Tensor = model(input_ids=given, use_cache=False, **images).logits[0]
            return logits
        except Exception as error:  # a model without this one, or its own code
            failure = in_one_line(error)
        finally:
            model.set_attn_implementation(of_text(model.config, ours) if sees else ours)
    raise ModelLoadError(f"this model cannot be compared with transformers' own attention: {failure}")


def steps(
    token_ids: list[int], spec: KVSpec, ends: Sequence[int] = ENDS, images: tuple[PlacedImage, ...] = ()
) -> Iterator[RankStep]:
    """Yield steps that compute the tokens part by part; each needs the logits of all its tokens.

    Args:
        ends: ends of the parts.
        images: images among the tokens.
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
            images=images,
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
