"""Serves choices on the workers: places each attempt, makes its calls, and learns from its failure.

`Dispatcher` is the entry point: service -> dispatcher (place, attempt, learn) -> exchange (the calls of one attempt).
Before that, `ImageLooker` has workers look at the images of a request.
"""

from router.dispatch.choice import Choice, ChoiceGroup
from router.dispatch.decisions import DecisionLog
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.images import ImageLooker, RequestImages
from router.dispatch.worker_client import WorkerCallError, WorkerClient

__all__ = [
    "Choice",
    "ChoiceGroup",
    "DecisionLog",
    "Dispatcher",
    "ImageLooker",
    "RequestImages",
    "WorkerCallError",
    "WorkerClient",
]
