"""Sampling pipeline: samples one token per sequence from a step's logits. `steps` has the stages of
the pipeline.

A token depends only on its request (parameters, seed, choice), its position, the tokens before it and its logits, so a
resumed or migrated stream samples the same tokens.
"""

__all__ = [
    "pipeline",
    "scores",
    "steps",
    "structure",
    "weights",
]
