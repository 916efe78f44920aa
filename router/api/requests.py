"""Operator endpoints about requests: the latest requests, and the timeline of one."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from starlette.exceptions import HTTPException

from baton.timelines import DEFAULT_LIMIT, list_json, timeline_json
from router.api.exchange import JsonAnswer, at_a_reports_turn
from router.request.request_log import RequestFilter
from router.service import RouterService

PATH = "/api/requests"
FRESH = {"Cache-Control": "no-store"}


def add_requests(app: FastAPI, service: RouterService) -> None:
    """Add the list of requests and the timeline of one."""

    @app.get(PATH)
    async def requests(
        request: Request,
        tenant: str = "",
        slo_class: str = "",
        outcome: Annotated[tuple[str, ...], Query()] = (),
        limit: int = DEFAULT_LIMIT,
    ) -> JsonAnswer:
        wanted = RequestFilter(tenant=tenant, slo_class=slo_class, outcomes=outcome, limit=limit)
        async with at_a_reports_turn(request):
            return JsonAnswer(list_json(service.requests.listed(wanted)), headers=FRESH)

    @app.get(f"{PATH}/{{request_id:path}}")
    async def request(request_id: str, tenant: str = "") -> JsonAnswer:
        found = service.requests.explain(request_id, tenant)
        if not found:
            raise HTTPException(
                404, f"this router does not know a request {request_id!r:.300}; {service.requests.keeps}"
            )
        return JsonAnswer({"requests": [timeline_json(each) for each in found]}, headers=FRESH)
