"""Who is admitted: tenants, validation of requests, a bound on how many are served at once, and deadlines.

`tenants` and `validate` refuse what may not be served at all, `limiter` what is too much for one tenant of a full
router, `accounts` what is beyond a tenant's own limits, over all routers, and `gate` what would come too late, by the
predicted time of its first token.
"""

from router.admission.accounts import Accounts, Charge
from router.admission.claim import Claim, SloCounts, claim_of
from router.admission.gate import TTFT_DEADLINE_FACTOR, Gate, QueueEntry
from router.admission.history import AnswerHistory
from router.admission.ledger import Ledger, MemoryLedger, RedisLedger
from router.admission.limiter import Limiter
from router.admission.validate import (
    MAX_REQUEST_ID,
    MAX_SETTLED,
    ModelFacts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    check_resume,
    check_special,
    check_vocabulary,
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
    "sampling_params",
    "truncation_of",
    "with_lengths",
]
