"""FlashInfer on a CPU, as far as it is used, by the source of flashinfer-python 0.7.4: plans before runs, and none
while a graph is captured; buffers of a graph that are large enough; a batch of the size, and queries and pages of the
types, that were planned.

It takes float32 and heads of any size, which the library does not. A run is one launch, which `graphs.FakeCapture`
keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

Pages = tuple[torch.Tensor, torch.Tensor]
ARE_OF_GRAPHS: list[bool] = []
"""Whether each wrapper that was made is a graph's."""


@contextmanager
def installed() -> Iterator[None]:
    """This module is what is imported as `flashinfer`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", sys.modules[__name__])
        yield


def _launch(kernel: Callable[..., None], *args: Any) -> None:
    kernel(*args)


class BatchDecodeWithPagedKVCacheWrapper:
    """Attends with what `plan` was given last; in a graph what that left in the buffers."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend == "fa2", "by itself it takes another one for some batches, which no probe may have met"
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "HND"
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all((buffer is not None) == use_cuda_graph for buffer in self._buffers)
        ARE_OF_GRAPHS.append(use_cuda_graph)
        self._heads: tuple[int, ...] = ()
        self._types: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.float16)
        self._window_left, self._sm_scale = -1, 0.0

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert _get_current_dispatch_mode() is None, "a plan is no part of a graph"
        given = (indptr, indices, last_page_len)
        assert all(each.dtype is torch.int32 for each in given)
        assert len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self._types = (q_data_type, kv_data_type)
        for place, (buffer, values) in enumerate(zip(self._buffers, given, strict=True)):
            if buffer is not None:
                assert len(values) <= len(buffer) if place == 1 else len(values) == len(buffer)
                buffer[: len(values)].copy_(values)
        self._planned = tuple(
            values if buffer is None else buffer for buffer, values in zip(self._buffers, given, strict=True)
        )
        self._heads = (num_qo_heads, num_kv_heads, page_size, head_dim)
        self._window_left, self._sm_scale = window_left, sm_scale

    def run(self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor) -> torch.Tensor:
        num_query_heads, *heads = self._heads
        assert q.shape == out.shape == (len(self._planned[2]), num_query_heads, heads[-1])
        assert q.is_contiguous()
        assert out.is_contiguous()
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype) == self._types
        assert list(keys.shape[1:]) == list(values.shape[1:]) == heads
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        _launch(self._attend, q, keys, values, out)
        return out

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        indptr, indices, last_page_len = self._planned
        num_query_heads, num_kv_heads, page_size, _ = self._heads
        for number, query in enumerate(q):
            pages = indices[indptr[number] : indptr[number + 1]].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[number])
            key, value = (
                each[pages]
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .repeat_interleave(num_query_heads // num_kv_heads, 0)
                for each in (keys, values)
            )
            scores = torch.einsum("hd,htd->ht", query.float(), key.float()) * self._sm_scale
            if self._window_left >= 0:
                scores[:, : max(0, length - 1 - self._window_left)] = -torch.inf
            out[number] = torch.einsum("ht,htd->hd", scores.softmax(-1), value.float())
