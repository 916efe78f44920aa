"""Shows routers what this worker has logged, so that an operator reads it without a shell on the worker's machine."""

from __future__ import annotations

from typing import Any

import grpc

from baton.telemetry import logs
from baton.v1 import worker_pb2, worker_pb2_grpc


class WorkerLog(worker_pb2_grpc.WorkerLogServicer):
    """Answers with the latest lines of this process's log."""

    async def ReadLog(  # noqa: N802 - the generated name
        self, request: worker_pb2.ReadLogRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ReadLogResponse:
        lines = logs.latest_lines()
        return worker_pb2.ReadLogResponse(lines=lines[-request.max_lines :] if request.max_lines else lines)
