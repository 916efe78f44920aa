"""What is let in: validation of a request, and a bound on how many are served at once."""

from router.admission.limiter import Limiter
from router.admission.validate import ModelFacts, check_length, check_model, check_prompt, sampling_params

__all__ = ["Limiter", "ModelFacts", "check_length", "check_model", "check_prompt", "sampling_params"]
