"""Traces of requests: their arrival times, and the blocks that their prompts share.

trace          the value types
files          reads the files of Mooncake and Azure
generator      generates conversations
shape          selects a part of a trace, and changes its speed or scale
fit_to_model   selects the part of a trace that a model of limited length can serve
"""

__all__ = ["files", "fit_to_model", "generator", "shape", "trace"]
