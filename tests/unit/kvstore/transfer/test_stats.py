from __future__ import annotations

import pytest

from baton.errors import (
    BatonError,
    TransferCancelled,
    TransferCorrupted,
    TransferError,
    TransferExpired,
    TransferRefused,
    TransferTimeout,
    WorkerFailed,
    text_of,
    transfer_error_of,
)
from kvstore.transfer.stats import TransferStats


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransferCorrupted("a"), "corrupted"),
        (TransferExpired("a"), "expired"),
        (TransferTimeout("a"), "timed_out"),
        (TransferRefused("a"), "refused"),
        (TransferError("a"), "lost"),
        (WorkerFailed("a"), "lost"),
    ],
)
def test_a_failure_has_one_reason(error: BatonError, reason: str) -> None:
    stats = TransferStats()
    stats.count_failure(error)
    assert stats == TransferStats(**{reason: 1})
    assert stats.failed == 1


def test_what_nobody_wanted_any_more_has_not_failed() -> None:
    stats = TransferStats()
    stats.count_failure(TransferCancelled("a"))
    assert stats == TransferStats()


@pytest.mark.parametrize(
    "cls", [TransferError, TransferCancelled, TransferCorrupted, TransferExpired, TransferRefused, TransferTimeout]
)
def test_an_error_keeps_its_type_across_a_session(cls: type[TransferError]) -> None:
    again = transfer_error_of(text_of(cls("what: happened")))
    assert (type(again), str(again)) == (cls, "what: happened")


def test_an_error_of_a_newer_release_is_a_transfer_error() -> None:
    again = transfer_error_of("TransferBewitched: by the moon")
    assert (type(again), str(again)) == (TransferError, "TransferBewitched: by the moon")
