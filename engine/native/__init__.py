"""Native step: computes a step in the project's own C code (`step.c`), for CPUs and the model types in `spec`.

`build` compiles the library, and `layout` has its structures. `spec` reads a model's configuration and the names of its
weights; `weights` packs matrices without loss and `model` a whole model; `quantized` converts them to the format of
`model.weights`. `weights_cache` keeps the result in a `packed_file`, and `unused` removes old files. `runner` is a
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
