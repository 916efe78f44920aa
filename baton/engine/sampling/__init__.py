"""Draws one token per sequence from a step's logits: the sampling pipeline and its random numbers.

The draw for a token depends on its request's seed and its position only, so that a resumed or moved stream draws the
same tokens.
"""

__all__ = ["pipeline", "random"]
