"""Draws one token per sequence from a step's logits: the sampling pipeline, a file for each of its steps.

A token depends on its request (parameters, seed, choice), its position, the tokens before it and its logits, and on
nothing else, so that a resumed or moved stream draws the same tokens.
"""

__all__ = [
    "bias",
    "candidates",
    "dry",
    "exclusions",
    "history",
    "masses",
    "penalties",
    "pipeline",
    "quick",
    "random",
    "ranking",
    "row",
    "scores",
    "structure",
    "truncation",
    "typical",
    "weights",
    "xtc",
]
