"""A Python environment with a fake vLLM, with which all of `engine.vllm` except `hooks` and its imports is tested.

The interpreter is a real one, in a virtual environment without the worker's packages. The installed vLLM has only a
name and a version. `torch` is a stub of another version. `hosted` replaces `engine.vllm.hooks`, which imports vLLM.
The host's loop, its messages and its process are the real ones.

    environment.py    in the tests' process: makes the environment
    redirect.py       in the host: replaces the hooks when the interpreter starts
    hosted.py         in the host: takes the place of `HostedVllm`, and computes the arithmetic model
    pool.py           in the host: its KV blocks and prefix cache

`hosted` and `pool` import Python's library and `engine.vllm.messages`, so a host starts in a fraction of a second.
"""
