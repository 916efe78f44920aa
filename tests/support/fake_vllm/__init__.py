"""A Python environment in which something pretends to be vLLM, so that everything but `engine.vllm.hooks` is tested.

The interpreter is a real one, in a virtual environment without packages of the worker's. What is installed there as
vLLM is a name and a version; `torch` is a stub of another version; and `engine.vllm.hooks`, which imports vLLM, is
replaced by `hosted`. The host's loop, its messages and its process are the real ones.

    environment.py    in the tests' process: makes the environment
    redirect.py       in the host: replaces the hooks when the interpreter starts
    hosted.py         in the host: takes the place of `HostedVllm`, and computes the arithmetic model
    pool.py           in the host: its KV blocks and prefix cache

`hosted` and `pool` import Python's library and `engine.vllm.messages`, so a host starts in a fraction of a second.
"""
