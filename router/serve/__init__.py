"""Serves choices on the workers: places each attempt, makes its calls, and learns from its failure.

`ChoiceDriver` is the entry point: service -> dispatcher (place, attempt, learn) -> exchange (the calls of one attempt).
Before that, `ImageLooker` has workers look at the images of a request.
"""

from router.serve.choice import Choice, ChoiceGroup
from router.serve.decisions import DecisionLog
from router.serve.driver import ChoiceDriver
from router.serve.images import ImageLooker, RequestImages
from router.serve.worker_client import WorkerCallError, WorkerClient

__all__ = [
    "Choice",
    "ChoiceDriver",
    "ChoiceGroup",
    "DecisionLog",
    "ImageLooker",
    "RequestImages",
    "WorkerCallError",
    "WorkerClient",
]
