"""Decode steps as graphs that are none, against the same steps by torch's attention; for `interpreted.process`."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.sampling import SamplingParams
from engine.core.runner import KVSpec, OnLayerDone, StepPart, ignore_layer
from engine.model.attention import ATTENTION_NAME, set_step
from engine.model.attention_choice import TorchAttention
from engine.model.kv_cache import KVCache
from engine.model.rank_step import Filling, RankStep
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers
from tests.fakes import flashinfer
from tests.fakes.graphs import FakeCapture
from tests.support.fusing import fuse_here
from tests.support.shapes import spec_of_model

NUM_BLOCKS, ROOM = 24, TableRoom(num_sequences=4, num_tokens=64)
SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": ROOM.num_tokens,
}  # fmt: skip
CPU = torch.device("cpu")


def model_of(**values: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | values)
    config._attn_implementation = ATTENTION_NAME
    return LlamaForCausalLM(config).eval()


def part_of(key: int, token: int, begin: int, **values: Any) -> StepPart:
    part = StepPart(
        sequence_key=key,
        token_ids=(token,),
        num_computed_tokens=begin,
        block_ids=(tuple(range(4 * key + 3, 4 * key - 1, -1)),),
        num_kv_tokens=(begin + 1,),
        sample=True,
        is_decoding=True,
        sampling=SamplingParams(temperature=0.0),
        choice_index=0,
        num_prompt_tokens=begin,
    )
    return part._replace(**values)


def step_of(*parts: StepPart) -> RankStep:
    return RankStep(parts, list(range(len(parts))))


STEPS = [
    step_of(part_of(0, 7, 20), part_of(1, 8, 0), part_of(2, 9, 15)),
    step_of(part_of(1, 3, 1)),
    step_of(part_of(2, 4, 16), part_of(0, 5, 21)),
    step_of(part_of(2, 4, 17), part_of(1, 6, 2), part_of(0, 5, 22), part_of(3, 1, 40)),
    step_of(part_of(4, 2, 63)),
]


def replays_differ_by(*, is_fused: bool = False, by_flashinfer: bool = False) -> tuple[float, list[int], list[int]]:
    """Returns by how much logits and KV of steps one after the other differ at most; replays of each graph, from the
    largest; and which layers were reported to readers.
    """
    from engine.model.decode_graphs import DecodeGraphs
    from engine.model.flashinfer_attention import FlashInferAttention
    from engine.model.kernel_attention import KernelAttention

    attention_type = FlashInferAttention if by_flashinfer else KernelAttention
    model, reference = model_of(), model_of()
    if is_fused:
        assert "2 FusedLayer" in fuse_here(model)[0]
    spec: KVSpec = spec_of_model(model.config)
    caches = [KVCache(spec, NUM_BLOCKS, 8) for _ in range(2)]
    caches[0].groups[0].normal_(generator=torch.Generator().manual_seed(1))
    caches[1].groups[0].copy_(caches[0].groups[0])
    capture, done = FakeCapture(), list[int]()
    with flashinfer.installed():
        graphs = DecodeGraphs(model, attention_type(caches[1], (2,), torch.float32, ROOM), capture)
    assert caches[1].groups[0].equal(caches[0].groups[0]), "a capture has written into a block"
    numbers, worst = StepNumbers(CPU), 0.0
    model.forward = None  # nobody may call it from here on
    for step in STEPS:
        expected = _computed(reference, TorchAttention(caches[0]), step)
        filling = Filling(torch.tensor([0]), torch.tensor([1]), torch.tensor([0, step.parts[0].token_ids[0]]))
        hidden = RankStep([step.parts[0]._replace(token_ids=(-1,)), *step.parts[1:]], step.sampling)
        _spoil_behind(caches[1], step)
        found = graphs.compute(hidden, _noting(done), filling, numbers)
        assert found is not None
        worst = max(worst, float((found - expected).abs().max().nan_to_num(torch.inf)))
        worst = max(worst, float((caches[1].groups[0] - caches[0].groups[0]).abs().nan_to_num(0).max()))
    return worst, [graph.num_replays for graph in capture.graphs], done


def _spoil_behind(cache: KVCache, step: RankStep) -> None:
    """Writes no numbers behind the last token of each part, where another request may have left them."""
    group = cache.spec.groups[0]
    pages = cache.groups[0].view(len(group.layers), cache.num_blocks, group.num_kv_heads, 2, group.block_size, -1)
    for part in step.parts:
        place, offset = divmod(part.end, group.block_size)
        if offset:
            pages[:, part.block_ids[0][place], :, :, offset:] = torch.nan


def _noting(done: list[int]) -> OnLayerDone:
    return lambda layer, fence: done.append(layer)


def launched_steps_differ_by() -> float:
    """Returns by how much logits of steps one after the other differ at most, where FlashInfer's fake decodes."""
    from engine.model.flashinfer_attention import FlashInferAttention

    model = model_of()
    caches = [KVCache(spec_of_model(model.config), NUM_BLOCKS, 8) for _ in range(2)]
    ways = (TorchAttention(caches[0]), FlashInferAttention(caches[1], (2,), torch.float32, ROOM))
    worst = 0.0
    with flashinfer.installed():
        for step in STEPS:
            expected, found = (_computed(model, way, step) for way in ways)
            worst = max(worst, float((found - expected).abs().max().nan_to_num(torch.inf)))
    return worst


@torch.inference_mode()
def _computed(model: Any, attention: Any, step: RankStep) -> torch.Tensor:
    from engine.model.attention import begun_blocks

    attention.cache.clear_blocks(begun_blocks(attention.cache, step.parts))
    set_step(attention.step(step.parts, ignore_layer, StepNumbers(CPU)))
    token_ids = torch.tensor([[part.token_ids[0] for part in step.parts]])
    positions = torch.tensor([[part.num_computed_tokens for part in step.parts]])
    found: torch.Tensor = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
    return found


def num_streams_of_captures() -> int:
    """Returns how many streams are taken for the graphs of two caches: the first steps', and the one that stays."""
    from engine.model.decode_graphs import CudaCapture

    taken: list[Any] = []

    def stream(device: torch.device) -> Any:
        taken.append(MagicMock())
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", stream)
        for name in ("current_stream", "stream", "graph", "CUDAGraph"):
            patch.setattr(torch.cuda, name, MagicMock())
        for _ in range(2):
            capture = CudaCapture(torch.device("cuda", 0))
            for _ in range(3):
                capture(lambda: torch.zeros(1))
    return len(taken)


def refusals() -> list[str]:
    """What the log says of models that are no graphs: by their RoPE, and since the host looks at what they compute."""
    from engine.model.decode_graphs import graphs_of
    from engine.model.kernel_attention import KernelAttention

    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("engine.model.decode_graphs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dynamic = model_of(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    looking = model_of()
    looking.lm_head.register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    for model in (dynamic, looking):
        cache = KVCache(spec_of_model(model.config), NUM_BLOCKS, 8)
        attention = KernelAttention(cache, (2,), torch.float32, ROOM)
        assert isinstance(graphs_of(model, attention, FakeCapture()), str)
    return words


def plans() -> dict[str, Any]:
    """What is planned of steps of all kinds."""
    from engine.model.decode_graphs import graph_size, graph_sizes, padded_numbers

    one = part_of(0, 7, 20)
    steps = {
        "one": step_of(one),
        "three": step_of(one, one, one),
        "too many": step_of(*[one] * 5),
        "drafts": step_of(one._replace(token_ids=(7, 8), num_drafts=1)),
        "a prompt": step_of(one._replace(token_ids=(7, 8))),
        "nobody samples": RankStep([one], []),
        "one does not": RankStep([one, one], [1]),
        "scores": RankStep([one], [0], num_scored=[1]),
    }
    sizes = {most: graph_sizes(most) for most in (1, 3, 5, 8, 9, 64, 256)}
    return {
        "sizes": sizes,
        "of": {name: graph_size(step, (1, 2, 4)) for name, step in steps.items()},
        "numbers": padded_numbers([part_of(0, 7, 20), part_of(1, 8, 3)], [5, 2], 4).tolist(),
    }
