"""Traces of requests: what arrives when, and which blocks the prompts share.

trace          the value types
files          reads Mooncake's and Azure's files
generator      generated conversations
shape          first part, window, speed, scale of a trace
fit_to_model   the part of a trace that a model of limited length can serve
"""

__all__ = ["files", "fit_to_model", "generator", "shape", "trace"]
