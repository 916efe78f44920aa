"""Description of the operator calls below /api for the OpenAPI document. `operations` and `requests` serve them."""

from __future__ import annotations

from typing import Any

from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES, RequestList, RequestTimeline
from baton.v1 import admin_pb2
from router.api.document import Api, OperatorCall
from router.api.openai.description import OPENAI
from router.api.operations import MAX_LOG_LINES, Order, RoleOrder, SizeOrder
from router.api.schemas import Schemas, described, many, of_dataclass, of_message
from router.cluster.load import RouterLoad
from router.cluster.watch import Alert

_TEXT: Schemas = {"type": "string"}
_COUNT: Schemas = {"type": "integer", "minimum": 0}
_SECONDS: Schemas = {"type": "number"}
_OBJECTIVE: Schemas = {"type": ["number", "null"]}
_TENANT = {**_TEXT, "description": "Tenant of the requests; empty: all tenants."}


def _status(into: Schemas) -> Schemas:
    of_message(admin_pb2.GetStatusResponse.DESCRIPTOR, into)
    cluster = into.pop("GetStatusResponse")
    own = {
        "now_s": _SECONDS,
        "version": _TEXT,
        "router": _TEXT,
        "not_ready": _TEXT,
        "takes_orders": {"type": "boolean"},
        "slo_classes": {
            "type": "object",
            "additionalProperties": described(dict.fromkeys(("ttft_s", "itl_s", "e2e_s"), _OBJECTIVE)),
        },
        "alerts": many(of_dataclass(Alert, into)),
        "load": of_dataclass(RouterLoad, into),
    }
    into["ClusterState"] = described(own | cluster["properties"], cluster["properties"].keys() - cluster["required"])
    return {"$ref": "#/components/schemas/ClusterState"}


def _history(into: Schemas) -> Schemas:
    into["HistorySlot"] = described(
        {"slot": _COUNT, "num_routers": _COUNT, "counts": {"type": "object", "additionalProperties": _SECONDS}}
    )
    return described(
        {
            "now_s": _SECONDS,
            "slot_s": _COUNT,
            "bounds": {"type": "object", "additionalProperties": many(_SECONDS)},
            "slots": many({"$ref": "#/components/schemas/HistorySlot"}),
        }
    )


def _requests(into: Schemas) -> Schemas:
    return of_dataclass(RequestList, into)


def _timelines(into: Schemas) -> Schemas:
    of_dataclass(RequestTimeline, into)
    whole = into.pop("RequestTimeline")["properties"]
    del whole["summary"]
    into["TimeLine"] = described({**into["RequestSummary"]["properties"], **whole})
    return described({"requests": many({"$ref": "#/components/schemas/TimeLine"})})


def _of(**properties: Schemas) -> Any:
    return lambda into: described(properties)


OPERATORS = Api(
    endpoints={},
    calls={
        "/api/status": OperatorCall(
            summary="The cluster: pools, workers, routers, Redis, objectives, alerts, and the router's load.",
            answer=_status,
        ),
        "/api/history": OperatorCall(
            summary="Counts of all routers over the last hour, in slots of ten seconds.",
            query={"since": {"type": "integer", "default": 0, "description": "Number of the first slot to return."}},
            answer=_history,
        ),
        "/api/requests": OperatorCall(
            summary="The latest requests of a router, without their content.",
            query={
                "tenant": _TENANT,
                "slo_class": {**_TEXT, "description": "SLO class of the requests; empty: all classes."},
                "outcome": {**many({"enum": list(OUTCOMES)}), "description": "Outcomes of the requests; none: all."},
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            },
            answer=_requests,
        ),
        "/api/requests/{request_id}": OperatorCall(
            summary="Timelines of a request: of all calls with this id that the router keeps.",
            query={"tenant": _TENANT},
            answer=_timelines,
        ),
        "/api/workers/{worker_id}/log": OperatorCall(
            summary=f"The latest {MAX_LOG_LINES} lines of a worker's output, log lines as text.",
            answer=_of(worker=_TEXT, lines=many(_TEXT)),
        ),
        "/api/metrics": OperatorCall(summary="The router's metrics, as Prometheus text."),
        "/version": OperatorCall(summary="The router's release.", answer=_of(version=_TEXT)),
        "/api/workers/{worker_id}/drain": OperatorCall(
            summary="Drains and replaces a worker: its requests migrate to other workers.",
            body=Order,
            answer=_of(worker=_TEXT, state={"const": "draining"}),
        ),
        "/api/workers/{worker_id}/role": OperatorCall(
            summary="Moves a worker to the other pool, with its cache.",
            body=RoleOrder,
            answer=_of(worker=_TEXT, role={"enum": ["prefill", "decode"]}),
        ),
        "/api/pools/{pool}": OperatorCall(
            summary="Sets the desired number of workers of a pool.",
            body=SizeOrder,
            answer=_of(pool=_TEXT, desired=_COUNT, ready=_COUNT),
        ),
    },
    error_name=OPENAI.error_name,
    error=OPENAI.error,
)
"""An order, which has a body, always needs an operator's key, even if no other call needs one."""
