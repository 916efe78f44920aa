"""Uploads of numbers from the host to a device, without waiting on either side.

A copy from pageable memory blocks the host until it is done, together with all earlier work of its stream. So numbers
are copied from pinned memory. Its allocator does not reuse a buffer before the copies from it are done, so the numbers
of a step do not overwrite those of the step before while they are being copied.
"""

from __future__ import annotations

import torch

_NOTHING = torch.empty(0, dtype=torch.int64)


def uploaded(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device, in order with the current stream's work. On a CPU return the same tensor."""
    if _is_host(device):
        return values
    pinned = _pinned(values.numel(), values.dtype).view(values.shape).copy_(values)
    return pinned.to(device, non_blocking=True)


class StepNumbers:
    """Integers that steps need on a device, those of a step together, in one copy.

    A step with more numbers than any before needs a second copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._size = 1024
        self._num_put = 0
        self._host, self._there = _NOTHING, _NOTHING.to(device)
        self._replacing: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor's counterpart on the device, valid for work submitted after `send`.

        On a CPU it is the same tensor.

        Args:
            values: of any shape, in int64.
        """
        if _is_host(self.device):
            return values
        if self._num_put + values.numel() > len(self._host):
            if self._num_put:
                self.send()
                self._size *= 2
            self._size = max(self._size, values.numel())
            host = _pinned(self._size, torch.int64)
            self._there = torch.empty(self._size, dtype=torch.int64, device=self.device)
            self._host = host  # assigned last: both allocations may fail
        begin, self._num_put = self._num_put, self._num_put + values.numel()
        self._host[begin : self._num_put].view(values.shape).copy_(values)
        return self._there[begin : self._num_put].view(values.shape)

    def replace(self, there: torch.Tensor, values: torch.Tensor) -> None:
        """Replace some numbers of a tensor on the device, before work submitted after `send`. On a CPU it happens at
        once.

        Args:
            there: tensor of one dimension.
            values: `[2, numbers]` on the CPU, in int64: indices into `there`, each once, and the new values.
        """
        if _is_host(self.device):
            there.index_copy_(0, *values)
        else:
            self._replacing.append((there, self.put(values)))

    def send(self) -> None:
        """Copy the numbers put since the last call, and perform the pending replacements."""
        if self._num_put:
            self._there[: self._num_put].copy_(self._host[: self._num_put], non_blocking=True)
        self._num_put, self._host = 0, _NOTHING  # the allocator has it back
        for there, values in self._replacing:
            there.index_copy_(0, *values)
        self._replacing.clear()


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _pinned(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, pin_memory=True)
