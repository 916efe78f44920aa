"""What the host gives a device, for which neither waits.

The host waits for a copy from memory that the system may move, and with it for all that its stream was asked before. So
numbers go from pinned memory. Its allocator gives none away again before the copies from it are done: the numbers of a
step are not written over those of the one before while they are on their way.
"""

from __future__ import annotations

import torch

_NOTHING = torch.empty(0, dtype=torch.int64)


def uploaded(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the CPU on a device, in what the current stream is asked from here on. On a CPU it is the
    same one.
    """
    if _is_host(device):
        return values
    pinned = _pinned(values.numel(), values.dtype).view(values.shape).copy_(values)
    return pinned.to(device, non_blocking=True)


class StepNumbers:
    """Whole numbers that steps need on a device, those of a step together, in one copy.

    A step with more numbers than any before needs a second one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._size = 1024
        self._num_put = 0
        self._host, self._there = _NOTHING, _NOTHING.to(device)
        self._replacing: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the CPU on the device, where it may be read in what is asked after `send`. On a CPU it is
        the same one.

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
            self._host = host  # if there is memory for both
        begin, self._num_put = self._num_put, self._num_put + values.numel()
        self._host[begin : self._num_put].view(values.shape).copy_(values)
        return self._there[begin : self._num_put].view(values.shape)

    def replace(self, there: torch.Tensor, values: torch.Tensor) -> None:
        """Has some numbers replaced that stay on the device, before what is asked after `send`. On a CPU they are
        replaced at once.

        Args:
            there: in one dimension.
            values: `[2, numbers]` on the CPU, in int64: places in `there`, each once, and what is to stand there.
        """
        if _is_host(self.device):
            there.index_copy_(0, *values)
        else:
            self._replacing.append((there, self.put(values)))

    def send(self) -> None:
        """Copies what was put since the last call, and replaces with it what is to be replaced."""
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
