"""A cluster in virtual time: requests arrive, a policy places them, engines step.

    pulled       arrival -> the worker that computes reserves -> the prefix moves -> as below
    aggregated   arrival -> worker: queue, prefill, decode -> done
    split        arrival -> decode worker reserves -> prefill worker: queue, prefill -> first token to the client
                         -> what the transfer did not hide behind the prefill -> decode worker decodes -> done

Pools may change (`Members`). A worker that leaves its pool gets no new work. Of what it has

    prompts that wait         are placed again
    prompts that it computes  are computed, and sent or moved on as usual
    answers under way         are reserved for on another decode worker -> their KV moves -> they go on there

One heap holds what happens next. Nothing here decides: placement is the policy's, batches and blocks are the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
