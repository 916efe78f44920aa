"""The RPC handlers of the decode role; the process is `worker`, which loads the handlers of both roles.

A decode worker receives the KV of prompts, or computes them itself in aggregated mode, and generates the output. The
code specific to that role is `service.DecodeService`.
"""

__all__ = ["service"]
