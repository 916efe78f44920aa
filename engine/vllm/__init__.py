"""vLLM as a worker's engine: an unpatched vLLM computes; Baton admits, reserves, samples, names blocks and resumes.

vLLM runs in a process of its own, the *host*, in the Python environment that `engine.vllm_python` names. It may have
another version of torch than the worker. The host imports the sources of Baton's `baton` and `engine` packages. So the
modules that it uses may import only what vLLM's environment has: Python's library, torch, numpy and llguidance.

    worker's process   engine.py      the `ServingEngine`: queue, reservations, block keys, load, costs
                       admission.py   which sequences go to the host, and the blocks reserved for them (pure)
                       block_names.py vLLM's block hashes <-> Baton's block keys (pure)
                       arguments.py   settings -> vLLM's arguments (pure)
                       handles.py     objects that the engine's callers hold: sequences, pins
                       caches.py      opens the KV cache, or serves without KV transfer
                       shared_cache.py the KV cache on CPUs, which both processes map
                       gpu_cache.py   the KV cache of one GPU, whose memory both processes use
                       process.py     starts, watches and ends the host
    both               messages.py    their messages
                       versions.py    which versions of vLLM are supported
    host's process     host.py        takes commands, executes a step, reports it
                       hooks.py       all code that uses vLLM's internals
                       connector.py   vLLM's interface for KV that other workers have or need
                       gpu_export.py  describes a GPU's memory so that the worker can open it
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
