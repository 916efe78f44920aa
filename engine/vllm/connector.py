"""Baton's KV connector for vLLM: keeps blocks for other workers, and waits for blocks from them.

vLLM makes two objects of this class in the host, one in its scheduler and one next to the model. Both run in the
thread that executes steps. The connector copies nothing: the worker maps the cache's memory, too, and its KV transfer
reads and writes it (`shared_cache`; on a GPU `gpu_export` and `gpu_cache`).

    PREFILL   vLLM computes a prompt and one token; the blocks stay allocated until the host releases them
    RECEIVE   vLLM allocates blocks for a prompt and waits; when the KV is there, it computes the last token again
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from engine.gpu_memory import CudaMemoryCalls
from engine.vllm.gpu_export import NotShared, exported
from engine.vllm.messages import Allocated, KvMemory, LayerDone, Message

HEAD_MAJOR = "LBHNC"
"""vLLM's name of a layout: each KV head's values of a block are contiguous, and blocks of a layer follow each other."""
TAKES_HEAD_MAJOR = {"FLASH_ATTN", "FLASHINFER"}
"""Attention backends of vLLM that support this layout. Another one might ignore the layout that vLLM declares."""
DESCRIPTOR = "descriptor"
"""Key in the connector's settings of the descriptor of the memory that the worker maps."""


@dataclass
class StepEnds(KVConnectorMetadata):
    """Number of tokens of each PREFILL sequence, by key, that are computed when the next step has ended."""

    ends: dict[int, int] = field(default_factory=dict)


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves of the connector.

    Attributes:
        send: takes messages to the worker, also within a step.
        prefilled: keys of the PREFILL sequences, by vLLM's request id, until they are released.
        received: keys of the RECEIVE sequences that have no blocks yet, by vLLM's request id.
        ends: `StepEnds.ends` of the step that was scheduled last.
        arrived: blocks that are missing, by request id, of requests whose KV has arrived in part.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.send: Callable[[Message], None] = _ignore
        self.prefilled: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.ends: dict[int, int] = {}
        self.arrived: dict[str, list[int]] = {}
        self.memory: KvMemory | None = None
        """Description of the shared cache; None: it cannot be shared."""
        self.descriptors: list[int] = []
        """Descriptors of a GPU's memory; see `gpu_export.Exported`."""
        self.why_not_shared = "its layers are not one buffer of rows"
        self._num_blocks: int = kv_cache_config.num_blocks
        self._reports_layers = True
        self._missing: set[int] = set()
        self._tables: dict[int, list[int]] = {}
        self._layers: dict[str, int] = {}
        self._map: mmap.mmap | None = None
        self._descriptor: int = vllm_config.kv_transfer_config.kv_connector_extra_config[DESCRIPTOR]

    # -- in the scheduler ----------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens arrive from another worker. vLLM asks in each step until it has allocated blocks."""
        is_received = request.request_id in self.received
        return (request.num_tokens - num_computed_tokens, True) if is_received else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Report the blocks of a RECEIVE sequence."""
        if num_external_tokens and (key := self.received.pop(request.request_id, None)) is not None:
            num_cached = request.num_tokens - num_external_tokens
            self.send(Allocated(key, list(blocks.get_block_ids()[0]), num_cached))

    def build_connector_meta(self, scheduler_output: Any) -> StepEnds:
        """Report the blocks of PREFILL sequences, and record how far the step computes them."""
        scheduled, self.ends = scheduler_output.num_scheduled_tokens, {}
        if not self.prefilled:
            return StepEnds()
        for new in scheduler_output.scheduled_new_reqs:
            if (key := self.prefilled.get(new.req_id)) is not None:
                self._tables[key] = list(new.block_ids[0])
                self.ends[key] = new.num_computed_tokens + scheduled[new.req_id]
                self.send(Allocated(key, self._tables[key], new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if (key := self.prefilled.get(request_id)) is None:
                continue
            self.ends[key] = cached.num_computed_tokens[index] + scheduled[request_id]
            if more := cached.new_block_ids[index]:
                self._tables[key] += more[0]
                self.send(Allocated(key, self._tables[key], -1))
        return StepEnds(self.ends)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Return whether vLLM must keep the blocks. It keeps those of a PREFILL sequence until `forget`."""
        return request.request_id in self.prefilled, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Do what `request_finished` does, for models with several groups of layers."""
        return request.request_id in self.prefilled, None

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self.received.pop(request_id, None)
        if (key := self.prefilled.pop(request_id, None)) is not None:
            self._tables.pop(key, None)

    # -- next to the model ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Put the cache into the shared memory, if it is one buffer of rows: see `KvMemory`."""
        tensors = list(kv_caches.values())
        if tensors[0].device.type != "cpu":
            self._share_gpu(kv_caches)
            return
        self._layers = {name: index for index, name in enumerate(kv_caches)}
        storage = tensors[0].untyped_storage()
        num_blocks, row_numel = tensors[0].shape[0], tensors[0][0].numel()
        for index, tensor in enumerate(tensors):
            is_like_first = tensor.shape == tensors[0].shape and tensor.dtype is tensors[0].dtype
            is_there = tensor.storage_offset() == index * num_blocks * row_numel
            is_in_first = tensor.untyped_storage().data_ptr() == storage.data_ptr()
            if not (is_like_first and is_there and is_in_first and tensor.is_contiguous()):
                return
        os.ftruncate(self._descriptor, storage.nbytes())
        self._map = mmap.mmap(self._descriptor, storage.nbytes())
        shared = torch.frombuffer(self._map, dtype=torch.int8).untyped_storage()
        layers = self._vllm_config.compilation_config.static_forward_context.values()
        views = [view for layer in layers if torch.is_tensor(view := getattr(layer, "kv_cache", None))]
        for tensor in {id(each): each for each in (*tensors, *views)}.values():
            if tensor.untyped_storage().data_ptr() == storage.data_ptr():
                tensor.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.memory = KvMemory(len(tensors), num_blocks, row_numel, dtype, [])

    def _share_gpu(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._reports_layers = False
        calls = CudaMemoryCalls(next(iter(kv_caches.values())).device)
        try:
            self.memory, self.descriptors = exported(kv_caches, self._num_blocks, calls)
        except NotShared as error:
            self.why_not_shared = str(error)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the preferred layout; None: any. vLLM asks after it has loaded the model, and may ignore it."""
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
        names = {layer.get_attn_backend().get_name() for layer in layers}
        return HEAD_MAJOR if names and names <= TAKES_HEAD_MAJOR else None

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Report that a layer's KV is complete. `Stepped` reports the last layer, and on a GPU all layers."""
        if not self._reports_layers:
            return
        ends = self._get_connector_metadata().ends
        if ends and (index := self._layers[layer_name] + 1) < len(self._layers):
            self.send(LayerDone(index, list(ends.items())))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Return the requests whose KV has arrived in part; see `get_block_ids_with_load_errors`."""
        arrived, self.arrived = self.arrived, {}
        self._missing = set(itertools.chain.from_iterable(arrived.values()))
        return None, set(arrived) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that have not arrived. vLLM computes their tokens and all later ones."""
        missing, self._missing = self._missing, set()
        return missing

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Do nothing: KV arrives outside of steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing: the worker reads the blocks after the step."""


def _ignore(message: Message) -> None:
    """Do nothing."""
