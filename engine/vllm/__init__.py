"""vLLM as a worker's engine: an unpatched vLLM computes, and Baton admits, reserves, draws, names blocks and resumes.

vLLM runs in a process of its own, the *host*, in the Python environment that `engine.vllm_python` names. It may have
another version of torch than the worker. The host's modules import Baton's `baton` and `engine` packages by their
sources, so everything that they import must be in vLLM's environment: Python's library, torch, numpy and llguidance.

    worker's process   engine.py      the `ServingEngine`: queue, reservations, block keys, load, costs
                       admission.py   which sequences the host gets, and what is reserved for them (pure)
                       block_names.py vLLM's block hashes <-> Baton's block keys (pure)
                       arguments.py   settings -> vLLM's arguments (pure)
                       handles.py     what callers of the engine hold: sequences, pins
                       caches.py      opens the KV cache, or serves without KV transfer
                       shared_cache.py the KV cache on CPUs, which both processes map
                       gpu_cache.py   the KV cache of one GPU, whose memory both processes use
                       process.py     starts, watches and ends the host
    both               messages.py    their messages
                       versions.py    which versions of vLLM are supported
    host's process     host.py        takes commands, executes a step, reports it
                       hooks.py       everything that touches vLLM's insides
                       connector.py   vLLM's interface for KV that other workers have or need
                       gpu_export.py  which memory of a GPU the worker opens
                       sampling.py    Baton's sampler inside vLLM's step
"""

__all__ = [
    "admission",
    "arguments",
    "block_names",
    "caches",
    "connector",
    "engine",
    "gpu_cache",
    "gpu_export",
    "handles",
    "hooks",
    "host",
    "messages",
    "process",
    "sampling",
    "shared_cache",
    "versions",
]
