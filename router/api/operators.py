"""JSON schemas of the answers to operators, for the OpenAPI document. `operations` and `requests` serve these calls."""

from __future__ import annotations

from baton.timelines import RequestList, RequestTimeline
from baton.v1 import admin_pb2
from router.api.schemas import Schemas, described, many, of_dataclass, of_message
from router.cluster.load import RouterLoad
from router.cluster.watch import Alert

_TEXT: Schemas = {"type": "string"}
_COUNT: Schemas = {"type": "integer", "minimum": 0}
_SECONDS: Schemas = {"type": "number"}
_OBJECTIVE: Schemas = {"type": ["number", "null"]}


def _by_name(schema: Schemas) -> Schemas:
    return {"type": "object", "additionalProperties": schema}


_CLUSTER = of_message(admin_pb2.GetStatusResponse.DESCRIPTOR)
STATUS = described(
    {
        "now_s": _SECONDS,
        "version": _TEXT,
        "router": _TEXT,
        "not_ready": _TEXT,
        "takes_orders": {"type": "boolean"},
        "slo_classes": _by_name(described(dict.fromkeys(("ttft_s", "itl_s", "e2e_s"), _OBJECTIVE))),
        "alerts": many(of_dataclass(Alert)),
        "load": of_dataclass(RouterLoad),
        **_CLUSTER["properties"],
    },
    optional=_CLUSTER["properties"].keys() - _CLUSTER["required"],
)
_SLOT = described({"slot": _COUNT, "num_routers": _COUNT, "counts": _by_name(_SECONDS)})
HISTORY = described({"now_s": _SECONDS, "slot_s": _COUNT, "bounds": _by_name(many(_SECONDS)), "slots": many(_SLOT)})
REQUESTS = of_dataclass(RequestList)
_WHOLE = of_dataclass(RequestTimeline)["properties"]
_TIMELINE = described(_WHOLE.pop("summary")["properties"] | _WHOLE)
TIMELINES = described({"requests": many(_TIMELINE)})
DRAINED = described({"worker": _TEXT, "state": {"const": "draining"}})
LOG = described({"worker": _TEXT, "lines": many(_TEXT)})
_ADAPTER = of_message(admin_pb2.RegisteredAdapter.DESCRIPTOR)
ADAPTERS = described({"adapters": many(_ADAPTER)})
ADDED = described({"adapter": _ADAPTER, "is_replaced": {"type": "boolean"}})
REMOVED = described({"name": _TEXT})
MOVED = described({"worker": _TEXT, "role": {"enum": ["prefill", "decode"]}})
RELEASE = described({"version": _TEXT})
SIZED = described({"pool": _TEXT, "desired": _COUNT, "ready": _COUNT})
