"""The test API server: `Api` over HTTP on a loopback port.

Go's clients send no credentials without TLS. So a user's token is also the first part of the URL in the kubeconfig, and
it is that one which counts.
"""

from __future__ import annotations

import json
import logging
import secrets
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.fakekube import rbac
from tests.fakekube.api import Api
from tests.fakekube.garbage import garbage_collector
from tests.fakekube.kinds import NAMESPACES
from tests.fakekube.messages import Request, Response
from tests.fakekube.status import Refused
from tests.fakekube.store import Key, Store

logger = logging.getLogger(__name__)
FIRST_NAMESPACES = ("default", "kube-system")


class RunningApi:
    """What tests see of a running server."""

    def __init__(self, store: Store, url: str, users: dict[str, str], folder: Path) -> None:
        self.store = store
        self.url = url
        """Without a token, which every request needs: see `kubeconfig`."""
        self._users = users
        self._folder = folder

    def kubeconfig(self, user: str = rbac.ADMIN, namespace: str = "default") -> Path:
        """A file with a token of that user's: `admin`, who may do everything, or `system:serviceaccount:NS:NAME`, who
        may do what roles allow."""
        token = secrets.token_hex(16)
        self._users[token] = user
        path = self._folder / f"{token}.yaml"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"{self.url}/{token}"}}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path


@contextmanager
def running_api() -> Generator[RunningApi]:
    """A server with the namespaces `default` and `kube-system`, until leaving."""
    store = Store()
    for name in FIRST_NAMESPACES:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "status": {"phase": "Active"}}
        labels = {"kubernetes.io/metadata.name": name}
        store.create(Key(NAMESPACES, "", name), namespace | {"metadata": {"labels": labels}})
    with tempfile.TemporaryDirectory() as folder, garbage_collector(store):
        server = _Server(Api(store))
        api = RunningApi(store, f"http://127.0.0.1:{server.server_port}", server.users, Path(folder))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="API server")
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            store.close_watches()
            server.hang_up()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    """So that closing waits for the connections' threads."""
    request_queue_size = 128

    def __init__(self, api: Api) -> None:
        self.api = api
        self.users: dict[str, str] = {}
        """By their token."""
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)  # before its thread starts, so that `hang_up` sees every one
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # else the client has gone
            super().handle_error(request, client_address)

    def hang_up(self) -> None:
        """Ends every connection. The server must no longer accept any."""
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is BaseHTTPRequestHandler's)
        logger.debug(format, *args)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._send(self._response(body))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 (http.server's names)

    def _response(self, body: bytes) -> Response:
        url = urlsplit(self.path)
        token, _, path = url.path.lstrip("/").partition("/")
        user = self.server.users.get(token)
        if user is None:
            return Response(code=401, body=Refused(401, "Unauthorized", "Unauthorized").status())
        request = Request(
            method=self.command,
            path=f"/{path}",
            query=dict(parse_qsl(url.query, keep_blank_values=True)),
            user=user,
            body=body,
            content_type=self.headers.get("Content-Type", ""),
            accept=self.headers.get("Accept", ""),
            agent=self.headers.get("User-Agent", ""),
        )
        try:
            response = self.server.api.answer(request)
        except Exception as error:
            logger.exception("%s %s", self.command, self.path)
            return Response(
                code=500, body=Refused(500, "InternalError", f"Internal error occurred: {error!r}").status()
            )
        logger.info("%s %s %s %s", user, self.command, request.path, response.code)
        return response

    def _send(self, response: Response) -> None:
        self.send_response(response.code)
        self.send_header("Content-Type", response.content_type)
        for warning in response.warnings:
            self.send_header("Warning", f'299 - "{warning.translate(QUOTED)}"')
        if response.stream is None:
            body = json.dumps(response.body).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for piece in response.stream:
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            elif self._client_has_gone():
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def _client_has_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)


QUOTED = str.maketrans({'"': '\\"', "\\": "\\\\"})
