"""Probes and hooks: what a kubelet asks a container, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakekube.store import Object

KINDS = ("startup", "liveness", "readiness")
Exec = Callable[[list[str]], Awaitable[int]]
"""Runs a command beside the container and returns its exit status."""


class Failed(Exception):
    """What was asked answered otherwise, or not at all."""


@dataclass(slots=True, kw_only=True)
class Threshold:
    """Answers in a row, and what they amount to."""

    successes: int
    failures: int
    is_good: bool
    """The verdict so far."""
    num_successes: int = 0
    num_failures: int = 0

    @classmethod
    def of(cls, probe: Object, is_good: bool) -> Threshold:
        return cls(
            successes=probe.get("successThreshold", 1), failures=probe.get("failureThreshold", 3), is_good=is_good
        )

    def seen(self, success: bool) -> bool:
        """Counts an answer. Whether this made the verdict, anew: it is then in `is_good`."""
        self.num_successes = self.num_successes + 1 if success else 0
        self.num_failures = 0 if success else self.num_failures + 1
        if success and self.num_successes == self.successes:
            self.is_good = True
            return True
        if not success and self.num_failures == self.failures:
            self.is_good = False
            return True
        return False


async def ask(probe: Object, container: Object, host: str, run: Exec, timeout_s: float) -> None:
    """One probe or hook: httpGet, tcpSocket, grpc, exec or sleep.

    Args:
        host: the pod's address.

    Raises:
        Failed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if "exec" in probe:
                if status := await run(probe["exec"].get("command") or []):
                    raise Failed(f"the command ended with {status}")
            elif "httpGet" in probe:
                await _get(probe["httpGet"], container, host)
            elif "tcpSocket" in probe:
                socket = probe["tcpSocket"]
                writer = (await asyncio.open_connection(socket.get("host", host), _port(socket, container)))[1]
                await _close(writer)
            elif "grpc" in probe:
                await asyncio.to_thread(_check_health, probe["grpc"], host, timeout_s)
            elif "sleep" in probe:
                await asyncio.sleep(probe["sleep"]["seconds"])
            else:
                raise Failed(f"this kubelet does not know {probe}")
    except TimeoutError:
        raise Failed(f"no answer in {timeout_s:g} s") from None
    except (OSError, EOFError) as error:
        raise Failed(str(error) or type(error).__name__) from error


async def _get(spec: Object, container: Object, pod_ip: str) -> None:
    host, port = spec.get("host", pod_ip), _port(spec, container)
    secure = None
    if spec.get("scheme", "HTTP") == "HTTPS":
        secure = ssl.create_default_context()
        secure.check_hostname, secure.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=secure)
    try:
        headers = {"Host": f"{host}:{port}", "User-Agent": "kube-probe/test", "Accept": "*/*", "Connection": "close"}
        headers |= {header["name"]: header["value"] for header in spec.get("httpHeaders") or []}
        lines = [f"GET {spec.get('path', '/')} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status = (await reader.readline()).decode(errors="replace").split(" ")
        if len(status) < 2 or not status[1].isdigit():
            raise Failed("the answer is not HTTP")
        if not 200 <= int(status[1]) < 400:
            raise Failed(f"HTTP probe failed with statuscode: {status[1]}")
    finally:
        await _close(writer)


def _check_health(spec: Object, host: str, timeout_s: float) -> None:
    """Blocks."""
    # A pool of its own: a probe must not wait out the back-off of the one before.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"{host}:{spec['port']}", options) as channel:
        request = health_pb2.HealthCheckRequest(service=spec.get("service") or "")
        try:
            found = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status
        except grpc.RpcError as error:
            raise Failed(f"{error.code().name}: {error.details()}") from None
    if found != health_pb2.HealthCheckResponse.SERVING:
        raise Failed(health_pb2.HealthCheckResponse.ServingStatus.Name(found))


def _port(spec: Object, container: Object) -> int:
    """A number, or the name of one of the container's ports."""
    port = spec["port"]
    if isinstance(port, int) or port.isdigit():
        return int(port)
    for named in container.get("ports") or []:
        if named.get("name") == port:
            return int(named["containerPort"])
    raise Failed(f"the container has no port {port!r}")


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
