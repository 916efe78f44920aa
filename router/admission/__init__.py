"""What is let in: validation of a request, and a bound on how many are served at once."""

from router.admission.limiter import Limiter
from router.admission.validate import (
    ModelFacts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    sampling_params,
    with_max_tokens,
)

__all__ = [
    "Limiter",
    "ModelFacts",
    "check_length",
    "check_model",
    "check_prompt",
    "check_request_id",
    "sampling_params",
    "with_max_tokens",
]
