"""The RPC handlers of the prefill role; the process is `worker`, which loads the handlers of both roles.

A prefill worker computes prompts and transfers their KV to a decode worker during the computation. The code specific to
that role is `service.PrefillService`.
"""

__all__ = ["service"]
