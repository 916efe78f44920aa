"""Sampling pipeline: samples one token per sequence from a step's logits. Each stage of the pipeline has a file.

A token depends only on its request (parameters, seed, choice), its position, the tokens before it and its logits, so a
resumed or migrated stream samples the same tokens.
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
