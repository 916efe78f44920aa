"""Turns choices into tokens: the workers of each attempt, calls to them, and what is learned when an attempt fails.

`Dispatcher` is the way in: service -> dispatcher (place, attempt, learn) -> exchange (the calls of one attempt).
"""

from router.dispatch.choice import Choice, ChoiceGroup
from router.dispatch.decisions import DecisionLog
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.worker_client import WorkerCallError, WorkerClient

__all__ = ["Choice", "ChoiceGroup", "DecisionLog", "Dispatcher", "WorkerCallError", "WorkerClient"]
