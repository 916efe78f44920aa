"""Numbers on their way to a device."""

from __future__ import annotations

import pytest
import torch

from engine import uploads
from engine.uploads import StepNumbers, uploaded
from tests.support.device_waits import DEVICE, Waits

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.arange(3)
    numbers = StepNumbers(CPU)
    assert uploaded(values, CPU) is values
    assert numbers.put(values) is values
    numbers.send()


def test_what_is_uploaded_is_pinned_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with Waits(monkeypatch) as waits:
        for values in (torch.rand(2, 3), torch.tensor([[1, 2]]), torch.empty(0, dtype=torch.int64)):
            found = uploaded(values, DEVICE)
            assert (found.device, found.shape, found.dtype) == (DEVICE, values.shape, values.dtype)
    assert not waits.found
    assert waits.num_copies == 3


def test_the_numbers_of_a_step_go_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step that is larger than all before needs no second copy any more."""
    numbers, copies = StepNumbers(DEVICE), list[int]()
    with Waits(monkeypatch) as waits:
        for sizes in ((3, 4), (600, 600), (600, 600), (5000, 1, 7), (5000, 1, 7), (2,)):
            for size in sizes:
                found = numbers.put(torch.arange(size).view(1, size))
                assert (found.device, found.shape, found.dtype) == (DEVICE, (1, size), torch.int64)
            numbers.send()
            copies.append(waits.num_copies - sum(copies))
    assert copies == [1, 2, 1, 2, 1, 1]
    assert not waits.found


def test_numbers_stand_where_they_were_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a CPU that passes for none, so that there is something to read."""
    monkeypatch.setattr(uploads, "_pinned", lambda size, dtype: torch.full((size,), -1, dtype=dtype))
    numbers = StepNumbers(CPU)
    monkeypatch.setattr(uploads, "_is_host", lambda device: False)
    values = [torch.arange(size).view(-1, 2) + 10 * size for size in (6, 0, 1000, 40, 2000)]
    for _ in range(3):
        found = [numbers.put(each) for each in values]
        numbers.send()
        assert all(one.equal(other) for one, other in zip(found, values, strict=True))
        assert all(one.data_ptr() != other.data_ptr() for one, other in zip(found, values, strict=True) if one.numel())
    numbers.send()


def test_numbers_that_stay_are_replaced_once_and_when_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_pinned", lambda size, dtype: torch.full((size,), -1, dtype=dtype))
    numbers, there = StepNumbers(CPU), torch.zeros(5, dtype=torch.int64)
    numbers.replace(there, torch.tensor([[4, 0], [8, 9]]))
    assert there.tolist() == [9, 0, 0, 0, 8], "on a CPU at once"
    monkeypatch.setattr(uploads, "_is_host", lambda device: False)
    numbers.replace(there, torch.tensor([[1, 4], [6, 7]]))
    numbers.put(torch.arange(2000))  # for which there is no room beside it
    numbers.replace(there, torch.tensor([[4], [5]]))
    assert there[1] in (0, 6)
    numbers.send()
    assert there.tolist() == [9, 6, 0, 0, 5]
    numbers.send()
    there.zero_()
    numbers.send()
    assert not there.any()


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_wait_is_seen(is_inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there, number = torch.zeros(3, 4, device=DEVICE), torch.tensor(1.0)
    with Waits(monkeypatch) as waits, torch.inference_mode(is_inference):
        torch.zeros(2).to(DEVICE)
        torch.zeros(2).to(DEVICE, non_blocking=True)
        there[0].copy_(torch.zeros(4), non_blocking=True)
        there[[0, 2]]
        there[0, [0, 2]] = 1.0
        there[torch.tensor([0, 2])] = 1.0
        torch.tensor([1, 2], device=DEVICE)
        with pytest.raises(Exception, match="meta"):
            there[0, 0].item()
        with pytest.raises(Exception, match="meta"):
            there.cpu()
        pinned = uploads._pinned(4, torch.float32)
        there[0].copy_(pinned)
        pinned.copy_(torch.ones(4))
    assert len(waits.found) == 11
    with Waits(monkeypatch) as waits:
        pinned = uploads._pinned(4, torch.float32)
        pinned.copy_(torch.ones(4))
        there[0].copy_(pinned, non_blocking=True)
        there[0] = 1.0
        there[1:, 2] *= number
    assert not waits.found
