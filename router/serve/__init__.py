"""Serves choices on the workers.

machine         the life of a choice: a pure state machine
driver          carries out its steps: places the choice, makes its calls, and passes the workers' messages to it
choice          the state of a choice, and of one attempt
selector        chooses workers over the current pools, and waits for them
worker_client   the calls to workers
retry           what the next placement avoids after failures
images          has workers look at the images of a request before it is placed
holding         holds requests of models that sleep until they are awake
waking          asks the controller to wake a model, and says how long to wait for it
"""

from router.serve.choice import Choice, ChoiceGroup
from router.serve.driver import ChoiceDriver
from router.serve.holding import HeldRequests, Holding, Release, prompt_bytes
from router.serve.images import ImageLooker, RequestImages
from router.serve.waking import Waker
from router.serve.worker_client import WorkerCallError, WorkerClient

__all__ = [
    "Choice",
    "ChoiceDriver",
    "ChoiceGroup",
    "HeldRequests",
    "Holding",
    "ImageLooker",
    "Release",
    "RequestImages",
    "Waker",
    "WorkerCallError",
    "WorkerClient",
    "prompt_bytes",
]
