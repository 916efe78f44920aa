"""Admission control: tenants, validation of requests, limits on concurrent requests, and deadlines.

`tenants` and `validate` refuse requests that are not allowed or invalid. `gate` refuses requests beyond a tenant's
share of a full router, those whose first token is predicted to come too late, and images that take too much memory.
`accounts` refuses those beyond the tenant's own limits, which all routers share.
"""

from router.admission.accounts import Accounts, Charge, Ledger, MemoryLedger, RedisLedger
from router.admission.gate import TTFT_DEADLINE_FACTOR, AnswerHistory, Gate, ImageMemory, Limiter, QueueEntry
from router.admission.validate import (
    MAX_REQUEST_ID,
    MAX_SETTLED,
    Claim,
    ModelFacts,
    SloCounts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    check_resume,
    check_special,
    check_vocabulary,
    claim_of,
    model_not_found,
    nearest_model,
    sampling_params,
    truncation_of,
    with_lengths,
)

__all__ = [
    "MAX_REQUEST_ID",
    "MAX_SETTLED",
    "TTFT_DEADLINE_FACTOR",
    "Accounts",
    "AnswerHistory",
    "Charge",
    "Claim",
    "Gate",
    "ImageMemory",
    "Ledger",
    "Limiter",
    "MemoryLedger",
    "ModelFacts",
    "QueueEntry",
    "RedisLedger",
    "SloCounts",
    "check_length",
    "check_model",
    "check_prompt",
    "check_request_id",
    "check_resume",
    "check_special",
    "check_vocabulary",
    "claim_of",
    "model_not_found",
    "nearest_model",
    "sampling_params",
    "truncation_of",
    "with_lengths",
]
