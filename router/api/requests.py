"""Operator endpoints about requests: the latest requests, and the timeline of one."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from starlette.exceptions import HTTPException

from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES, list_json, timeline_json
from router.api.exchange import JsonAnswer, at_a_reports_turn
from router.api.operators import REQUESTS, TIMELINES
from router.api.routes import answers
from router.service import RouterService
from router.timeline.log import RequestFilter

PATH = "/api/requests"
FRESH = {"Cache-Control": "no-store"}
_Tenant = Annotated[str, Query(description="Tenant of the requests; empty: all tenants.")]
_OUTCOMES = Query(
    description="Outcomes of the requests; none: all.", json_schema_extra={"items": {"enum": list(OUTCOMES)}}
)


def add_requests(app: FastAPI, service: RouterService) -> None:
    """Add the list of requests and the timeline of one."""

    @app.get(PATH, responses=answers(REQUESTS))
    async def requests(
        request: Request,
        tenant: _Tenant = "",
        slo_class: Annotated[str, Query(description="SLO class of the requests; empty: all classes.")] = "",
        outcome: Annotated[tuple[str, ...], _OUTCOMES] = (),
        limit: Annotated[int, Query(json_schema_extra={"minimum": 1, "maximum": MAX_LIMIT})] = DEFAULT_LIMIT,
    ) -> JsonAnswer:
        """Return the latest requests of a router, without their content."""
        wanted = RequestFilter(tenant=tenant, slo_class=slo_class, outcomes=outcome, limit=limit)
        async with at_a_reports_turn(request):
            return JsonAnswer(list_json(service.requests.listed(wanted)), headers=FRESH)

    @app.get(f"{PATH}/{{request_id:path}}", responses=answers(TIMELINES))
    async def request(request_id: str, tenant: _Tenant = "") -> JsonAnswer:
        """Return the timelines of a request: of all calls with this id that the router keeps."""
        found = service.requests.explain(request_id, tenant)
        if not found:
            raise HTTPException(
                404, f"this router does not know a request {request_id!r:.300}; {service.requests.keeps}"
            )
        return JsonAnswer({"requests": [timeline_json(each) for each in found]}, headers=FRESH)
