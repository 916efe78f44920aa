"""Every error that crosses a boundary, in one tree.

    BatonError                     INTERNAL             500
    ├── InvalidRequest             INVALID_ARGUMENT     400   the client can fix it; the message says how
    │   ├── ModelNotFound          NOT_FOUND            404
    │   ├── ContextLengthExceeded  INVALID_ARGUMENT     400   prompt and output exceed the context window
    │   ├── UnknownField           INVALID_ARGUMENT     400   an unknown field that may change the output
    │   └── TooLarge               RESOURCE_EXHAUSTED   413   the request alone exceeds the memory of a worker's device
    ├── Unauthenticated            UNAUTHENTICATED      401   no API key, or an unknown one
    ├── Forbidden                  PERMISSION_DENIED    403   a tenant's key for a call that only operators may make
    ├── NotRead                    RESOURCE_EXHAUSTED   408   the client has not read its response
    ├── NotWhole                   DEADLINE_EXCEEDED    408   the client has not sent its whole message
    ├── Unsupported                UNIMPLEMENTED        400   a field or method not supported yet, or known by no worker
    ├── Overloaded                 RESOURCE_EXHAUSTED   429   try again after `retry_after_s`
    │   └── QuotaExceeded          RESOURCE_EXHAUSTED   429   the tenant has exhausted one of its limits
    ├── NoWorker                   UNAVAILABLE          503   no worker of the needed pool is ready
    │   └── ModelWaking            UNAVAILABLE          503   a model wakes, and no more requests can be held
    ├── WorkerFailed               UNAVAILABLE          503   a worker died or broke its stream; another may serve
    │   ├── NotAMember             UNAUTHENTICATED      503   a call between members without a valid proof
    │   ├── DeviceLost             UNAVAILABLE          503   its device no longer computes: the process must end
    │   │   └── LostInStep         UNAVAILABLE          503   the device was lost in a step that computed this request
    │   └── ActorLost              UNAVAILABLE          503   Ray has lost its actor; the process may still serve
    ├── WorkerDraining             UNAVAILABLE          503   a worker takes no new work; another may serve
    ├── RouterStopping             UNAVAILABLE          503   a router stops; another may continue the request
    ├── NoController               UNAVAILABLE          503   no controller is alive to change the pools
    ├── Conflict                   FAILED_PRECONDITION  503   an order conflicts with the cluster's state
    ├── ImagesMissing              FAILED_PRECONDITION  503   a worker lacks images of a prompt; send their bytes
    ├── AdapterUnreadable          UNAVAILABLE          503   a worker cannot read an adapter; another may serve
    ├── TransferError              ABORTED              503   KV did not arrive; the prompt is recomputed elsewhere
    │   ├── TransferCancelled      ABORTED              503   nothing failed: the KV is no longer wanted
    │   ├── TransferRefused        FAILED_PRECONDITION  503   the two sides are incompatible; the message says why
    │   ├── TransferCorrupted      DATA_LOSS            503   a chunk failed its header or checksum test
    │   └── TransferTimeout        DEADLINE_EXCEEDED    503   one operation took too long
    │       └── TransferExpired    DEADLINE_EXCEEDED    503   the lease ended before the KV arrived
    ├── StoreUnavailable           UNAVAILABLE          503   Redis does not answer; known state is used in the meantime
    ├── Fenced                     FAILED_PRECONDITION  503   a newer incarnation of this worker holds its lease
    ├── ModelLoadError             FAILED_PRECONDITION  500   the model cannot run here; the message says why
    └── ConfigError                FAILED_PRECONDITION  500
        └── NotNative              FAILED_PRECONDITION  500   the native step does not support this; transformers may

`status` is the name of a gRPC status code and `http` an HTTP code; `baton.rpc.errors` and `router.api.http` read them.

Between two of Baton's processes an error is sent as its `kind` (the class's name) and its `message`; `kind_of` and
`error_of` are the codec. gRPC trailers and the workers' streams have a field for each, the control streams of the
KV transfer have one text for both (`text_of`, `transfer_error_of`).
"""

from __future__ import annotations

from typing import ClassVar

from baton.quota import UNLIMITED, Quota


class BatonError(Exception):
    """Base of the tree. The message is written for the person who must act on it."""

    status: ClassVar[str] = "INTERNAL"
    http: ClassVar[int] = 500
    retry_after_s: float | None = None
    """Seconds after which the client may try again; None: unknown."""


class InvalidRequest(BatonError):
    """The request cannot be served as it is. `param` names the invalid field."""

    status = "INVALID_ARGUMENT"
    http = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(InvalidRequest):
    status = "NOT_FOUND"
    http = 404


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and the requested number of tokens, exceed the model's context window."""


class UnknownField(InvalidRequest):
    """A body has a field that its API does not know and that may change the result. `param` is the client's name."""


class TooLarge(InvalidRequest):
    """A step of this sequence alone exceeds a device's memory; other workers could not compute it either."""

    status = "RESOURCE_EXHAUSTED"
    http = 413

    def __init__(
        self,
        message: str = "a step of this request alone does not fit into the memory of a worker's device; shorten the "
        "prompt, or have the operator lower engine.max_num_batched_tokens or engine.kv_cache_gib",
        param: str | None = None,
    ) -> None:
        super().__init__(message, param)


class Unauthenticated(BatonError):
    """The caller has no tenant's API key."""

    status = "UNAUTHENTICATED"
    http = 401


class Forbidden(BatonError):
    status = "PERMISSION_DENIED"
    http = 403


class NotRead(BatonError):
    status = "RESOURCE_EXHAUSTED"
    http = 408


class NotWhole(BatonError):
    status = "DEADLINE_EXCEEDED"
    http = 408


class Unsupported(BatonError):
    """A field or method that is part of the contract and not supported yet. `param` names it."""

    status = "UNIMPLEMENTED"
    http = 400  # clients treat a 5xx as a temporary failure, and retry

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(BatonError):
    status = "RESOURCE_EXHAUSTED"
    http = 429
    retry_after_s: float

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """The tenant has exhausted a limit. `quota` is its remaining quota; it is not sent between processes."""

    def __init__(self, message: str, retry_after_s: float = 1.0, quota: Quota = UNLIMITED) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


class NoWorker(BatonError):
    status = "UNAVAILABLE"
    http = 503


class ModelWaking(NoWorker):
    """A model wakes, and the router cannot hold one more request for it. The client should try again later."""

    retry_after_s: float

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerFailed(BatonError):
    status = "UNAVAILABLE"
    http = 503


class NotAMember(WorkerFailed):
    """A call between two members of a cluster had no proof of membership, or a wrong one."""

    status = "UNAUTHENTICATED"


class DeviceLost(WorkerFailed):
    """A worker's device cannot recover in its process. Another worker may serve the request."""


class LostInStep(DeviceLost):
    """A worker's device was lost in a step that computed this request, which may have caused it."""


class ActorLost(WorkerFailed):
    """Ray has lost the worker's actor, or its node, or cannot place a new one. The worker's process may still serve."""


class WorkerDraining(BatonError):
    status = "UNAVAILABLE"
    http = 503


class RouterStopping(BatonError):
    """The router stops, and the request has not completed within `router.drain_timeout_s`."""

    status = "UNAVAILABLE"
    http = 503

    def __init__(
        self, message: str = "the router stops before the response is complete; send the request again"
    ) -> None:
        super().__init__(message)


class NoController(BatonError):
    status = "UNAVAILABLE"
    http = 503


class Conflict(BatonError):
    status = "FAILED_PRECONDITION"
    http = 503


class ImagesMissing(BatonError):
    """The worker has to compute images whose bytes it does not hold. The sequence succeeds once they are sent again."""

    status = "FAILED_PRECONDITION"
    http = 503

    def __init__(
        self, message: str = "this worker does not hold the bytes of the prompt's images; send them with the request"
    ) -> None:
        super().__init__(message)


class AdapterUnreadable(BatonError):
    """The worker cannot read the adapter of this request. It serves others, and another worker may serve this one."""

    status = "UNAVAILABLE"
    http = 503


class TransferError(BatonError):
    status = "ABORTED"
    http = 503


class TransferCancelled(TransferError):
    pass


class TransferRefused(TransferError):
    status = "FAILED_PRECONDITION"


class TransferCorrupted(TransferError):
    status = "DATA_LOSS"


class TransferTimeout(TransferError):
    status = "DEADLINE_EXCEEDED"


class TransferExpired(TransferTimeout):
    pass


class StoreUnavailable(BatonError):
    """The shared store did not answer, or refused. Ownership is a hint, so callers continue and retry later."""

    status = "UNAVAILABLE"
    http = 503


class Fenced(BatonError):
    status = "FAILED_PRECONDITION"
    http = 503


class ModelLoadError(BatonError):
    status = "FAILED_PRECONDITION"


class ConfigError(BatonError):
    status = "FAILED_PRECONDITION"


class NotNative(ConfigError):
    """The native step does not support this model, machine or combination of settings."""


def in_one_line(error: Exception) -> str:
    """Return a library's error with its class: the text of some, such as KeyError, means nothing alone."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def first_of(errors: BaseExceptionGroup[BatonError]) -> BatonError:
    """Return the first error of a group, which may consist of groups."""
    error = errors.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error


# -- the codec -------------------------------------------------------------------------------------------------------


def _tree(cls: type[BatonError]) -> dict[str, type[BatonError]]:
    return {cls.__name__: cls, **{name: c for sub in cls.__subclasses__() for name, c in _tree(sub).items()}}


_CLASSES = _tree(BatonError)


def kind_of(error: BatonError) -> str:
    """Return the wire name of the error's class; its message is `str(error)`."""
    return type(error).__name__


def error_of(kind: str, message: str, retry_after_s: float = 1.0) -> BatonError | None:
    """Decode an error.

    Returns:
        None for an unknown kind, and for a defect, which is sent as a plain `BatonError`.
    """
    cls = _CLASSES.get(kind, BatonError)
    if cls is BatonError:
        return None
    return cls(message, retry_after_s) if issubclass(cls, Overloaded | ModelWaking) else cls(message)


def text_of(error: BatonError) -> str:
    """Encode an error as one text, `kind: message`."""
    return f"{kind_of(error)}: {error}"


def transfer_error_of(text: str) -> TransferError:
    """Decode a text of `text_of`; a text of another form, or of another kind of error, becomes the message."""
    kind, _, message = text.partition(": ")
    error = error_of(kind, message)
    return error if isinstance(error, TransferError) else TransferError(text)
