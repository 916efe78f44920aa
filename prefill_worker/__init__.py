"""The RPC handlers of the prefill role; the process is `worker`, which loads the handlers of both roles.

A prefill worker computes prompts and hands their KV over to a decode worker while it computes. What is particular to
that role is here: `service.PrefillService`.
"""

__all__ = ["service"]
