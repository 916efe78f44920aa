"""A step computed by C code of our own: `step.c`, for CPUs and the model types that `spec` describes.

`build` makes the library of it, `spec` reads a model's configuration and the names of its weights, `weights` packs them
without loss, and `runner` is a `Runner` of `baton.engine.core` over the KV cache of `baton.engine.model`.
"""

__all__ = ["build", "layout", "runner", "spec", "weights"]
