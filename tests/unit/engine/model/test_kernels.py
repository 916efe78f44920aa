"""The kernels in Triton's interpreter, against torch's own attention."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor

import pytest

from tests.support import interpreted
from tests.support.interpreted import Case

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
MIXED = ((5, 0, 0), (7, 0, 20), (1, 0, 0), (1, 0, 33))
DRAFTS = ((3, 0, 14), (1, 3, 20), (1, 0, 60), (1, 5, 8))
LONG = ((1, 0, 300), (1, 0, 130), (1, 0, 127))
CASES = {
    "dimensions 64": Case(MIXED, 64, 4),
    "dimensions 72": Case(MIXED, 72, 2),
    "dimensions 80": Case(MIXED, 80, 1, window=11),
    "dimensions 96": Case(DRAFTS, 96, 3),
    "dimensions 128": Case(MIXED, 128, 8, 1),
    "dimensions 192": Case(DRAFTS, 192, 2, window=9),
    "dimensions 256": Case(MIXED, 256, 5, 1),
    "few dimensions": Case(MIXED, 8, 2),
    "7 share": Case(DRAFTS, 64, 7),
    "6 share, one window": Case(DRAFTS, 64, 6, 1, window=1),
    "shares of keys": Case(LONG, 64, 4, 1),
    "shares of keys in a window": Case(LONG, 64, 1, window=200),
    "most shares": Case(((1, 0, 2100),), 16, 2, 1),
    "large blocks": Case((*MIXED, *LONG), 64, 2, 1, block_size=48),
    "a prompt of many tiles": Case(((70, 0, 3),), 64, 3, 1, window=20),
    "a prompt alone": Case(((40, 0, 0),), 64, 1, 1),
    "pages of bfloat16": Case(MIXED, 64, 2, pool="bfloat16"),
    "pages of float16": Case(DRAFTS, 80, 2, pool="float16"),
    "pages of 8-bit floats": Case(MIXED, 64, 2, pool="float8_e4m3fn"),
    "pages of 8-bit floats, shares": Case(LONG, 64, 4, 1, pool="float8_e4m3fn"),
    "blocks given back": Case(((1, 0, 9), (1, 0, 60)), 64, 2, window=16, empty=2),
    "limited scores": Case(MIXED, 64, 2, softcap=1.5),
    "limited scores, shares, a window": Case(LONG, 64, 2, 1, window=200, softcap=1.5),
    "sinks": Case(MIXED, 64, 3, has_sinks=True),
    "sinks, shares of keys": Case(LONG, 64, 4, 2, has_sinks=True),
    "sinks in a window, drafts": Case(DRAFTS, 64, 2, window=9, has_sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_torchs(name: str, interpreter: Executor) -> None:
    """Also where what nobody has written are no numbers, which torch's must not meet."""
    assert interpreter.submit(interpreted.difference, CASES[name]).result() <= 2e-6


@pytest.mark.parametrize(
    "name",
    ["dimensions 64", "dimensions 80", "dimensions 128", "7 share", "shares of keys in a window", "large blocks",
     "blocks given back"],
)  # fmt: skip
@pytest.mark.parametrize("as_in_graphs", [False, True])
def test_decodes_by_flashinfer_are_torchs(name: str, as_in_graphs: bool, interpreter: Executor) -> None:
    """Its fake meets no numbers as well. Prompts and drafts beside them stay with the kernels."""
    assert (
        interpreter.submit(interpreted.difference, CASES[name], by_flashinfer=True, as_in_graphs=as_in_graphs).result()
        <= 2e-6
    )


@pytest.mark.parametrize("num_programs", [1, 9])
@pytest.mark.parametrize("name", ["shares of keys", "most shares", "shares of keys in a window"])
def test_few_programs_compute_all_shares(name: str, num_programs: int, interpreter: Executor) -> None:
    assert interpreter.submit(interpreted.difference_by, num_programs, CASES[name]).result() <= 2e-6


HALVES = {
    "mixed": Case(MIXED, 64, 2, pool="float16", dtype="float16"),
    "more keys at once than a block has": Case(
        ((1, 0, 9), (1, 0, 60)), 64, 2, window=16, empty=2, pool="float16", dtype="float16"
    ),
    "drafts in a window": Case(((1, 0, 9), (1, 3, 90)), 64, 2, window=16, empty=4, pool="float16", dtype="float16"),
    "a prompt in a window": Case(((100, 0, 90),), 64, 2, 1, window=70, empty=1, pool="float16", dtype="float16"),
}


@pytest.mark.parametrize("name", HALVES)
def test_halves_come_out_as_near_as_halves_are(name: str, interpreter: Executor) -> None:
    assert interpreter.submit(interpreted.difference, HALVES[name]).result() <= 4e-3


def test_offsets_are_wide_enough_for_large_pools(interpreter: Executor) -> None:
    assert interpreter.submit(interpreted.far_block_is_found).result()


@pytest.mark.parametrize("num_columns", [48, 5000])
def test_rows_become_the_8_bit_floats_of_torch(num_columns: int, interpreter: Executor) -> None:
    assert interpreter.submit(interpreted.rows_become_8_bit_floats, num_columns).result()


def test_padding_is_nobodys(interpreter: Executor) -> None:
    """Neither is it written, nor does it come out as anything but zeros."""
    assert interpreter.submit(interpreted.padding_is_nobodys).result()
