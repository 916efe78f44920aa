"""What the opening of a pair costs a healthy pair of the same GPU: time, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import TransferError
from kvstore.transfer.transport.nccl_turns import Direction
from tests.fakes.gpu import FakeGpu, fake_gpus
from tests.fakes.nccl import Knobs
from tests.unit.kvstore.transfer.transport.nccl_pairs import LONG_S, cross, opened, turn_of

OP_TIMEOUT_S = 2.0


@pytest.fixture
def gpus(knobs: Knobs) -> Iterator[list[FakeGpu]]:
    with fake_gpus(3) as gpus:
        yield gpus


def late(gpu: FakeGpu, late_s: float) -> None:
    """Keeps the receive turn of a GPU for a time."""
    turns = turn_of(gpu)
    turns.device.take(turns, Direction.RECEIVE, LONG_S)
    threading.Timer(late_s, turns.device.leave, (turns, Direction.RECEIVE)).start()


@pytest.mark.parametrize(
    ("late_share", "opening_share", "shared"),
    [
        pytest.param(0.5, 0.65, "the receiver's", id="slow-peer-slow-opening"),
        pytest.param(0.5, None, "the receiver's", id="slow-peer-hanging-opening-with-the-receiver"),
        pytest.param(0.5, None, "the sender's", id="slow-peer-hanging-opening-with-the-sender"),
        pytest.param(0.0, None, "the receiver's", id="hanging-opening-with-the-receiver"),
        pytest.param(0.0, None, "the sender's", id="hanging-opening-with-the-sender"),
    ],
)
def test_a_pair_lives_while_another_one_of_its_gpu_opens_or_hangs(
    late_share: float, opening_share: float | None, shared: str, gpus: list[FakeGpu], knobs: Knobs
) -> None:
    """The shares are of the limit of one message, for which transfers wait."""
    source, target, other = gpus
    for number, gpu in enumerate((target, source, other) if shared == "the receiver's" else (source, target, other)):
        turn_of(gpu).device.id = f"{number:032x}"  # the shared one goes first, and waits for its peer
    healthy = opened(source, target, op_timeout_s=OP_TIMEOUT_S)
    knobs.never_opens = opening_share is None
    knobs.opening_s = (opening_share or 0.0) * OP_TIMEOUT_S
    if late_share:
        late(other, late_share * OP_TIMEOUT_S)
    ends = (other, target) if shared == "the receiver's" else (source, other)
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(opened, *ends, op_timeout_s=OP_TIMEOUT_S, nccl_mode="blocking-eager")
        value = 0
        while not opening.done():
            value = (value + 1) % 250
            cross(healthy, source, target, value)
        if opening_share is None:
            with pytest.raises(TransferError):
                opening.result()
        else:
            cross(opening.result(), *ends, 251)
            opening.result().close()
    cross(healthy, source, target, 252)
    healthy.close()
