"""Counter-based random numbers: the draw for a token depends only on its request."""

from __future__ import annotations

import hashlib

DRAW = 0
XTC = 1


def uniform(seed: int, choice_index: int, position: int, purpose: int = DRAW) -> float:
    """Return the random number in [0, 1) that decides the token at `position` of a choice.

    Each purpose has its own numbers, so other random decisions are independent of the draw. The number is a pure
    function of its arguments, so a stream that is resumed on another worker draws the same numbers.
    """
    counter = (seed % 2**64).to_bytes(8, "little") + choice_index.to_bytes(4, "little") + position.to_bytes(8, "little")
    if purpose != DRAW:
        counter += purpose.to_bytes(1, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
