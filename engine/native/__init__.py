"""A step computed by C code of our own: `step.c`, for CPUs and the model types that `spec` describes.

`build` makes the library of it, and `layout` has its structures; `spec` reads a model's configuration and the names of
its weights, `weights` packs matrices without loss and `model` a whole model; `quantized` makes of them what
`model.weights` names; `weights_cache` keeps it in a `packed_file`, and `unused` removes what is old; `runner` is a
`Runner` of `engine.core` over the KV cache of `engine.model`.
"""

__all__ = [
    "build",
    "layout",
    "model",
    "packed_file",
    "quantized",
    "runner",
    "spec",
    "unused",
    "weights",
    "weights_cache",
]
