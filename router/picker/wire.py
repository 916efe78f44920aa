"""Messages of Envoy's external processing, as the endpoint picker reads and writes them.

The names of headers and metadata are those of the endpoint picker protocol of the Gateway API inference extension
(proposal 004, version 1.0.0).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.struct_pb2 import Struct, Value

from baton.errors import BatonError, Overloaded
from router.admission import MAX_REQUEST_ID
from router.admission.tenants import api_key_of
from router.api.apis import error_body
from router.api.exchange import REQUEST_ID, ascii_json
from router.api.sessions import SESSION
from router.picker.pick import Subset
from router.picker.v3.external_processor_pb2 import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    GRPC,
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpHeaders,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
"""Namespaces of the metadata."""
MAX_PIECE = 60 * 2**10
"""Maximum number of bytes of a body in one response. Envoy recommends at most 64 KiB."""
DUPLEX = frozenset({FULL_DUPLEX_STREAMED, GRPC})
"""Body modes in which the gateway sends a body on without waiting, and forwards the body that the picker sends back."""
WHOLE = frozenset({BUFFERED, BUFFERED_PARTIAL})
"""Body modes in which the body comes in one message, after the response to the headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The start of an HTTP request, as a gateway describes it."""

    path: str
    request_id: str
    api_key: str | None
    session: str
    """Name that the client gives its session; empty: none."""
    has_body: bool
    subset: Subset | None
    """Endpoints to which the gateway limits the choice; None: all."""
    request_mode: int
    response_mode: int
    """Body modes. Gateways that do not announce them stream bodies in both directions, as the protocol demands."""


def request_of(message: ProcessingRequest) -> Request:
    """Read the message with a request's headers."""
    headers = dict(_headers(message.request_headers))
    given = headers.get(REQUEST_ID, b"").decode(errors="replace")
    is_fit = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    has_modes = message.HasField("protocol_config")
    return Request(
        path=headers.get(":path", b"").decode(errors="replace").partition("?")[0],
        request_id=given if is_fit else uuid.uuid4().hex,
        api_key=api_key_of(headers.items()),
        session=headers.get(SESSION, b"").decode(errors="replace"),
        has_body=not message.request_headers.end_of_stream,
        subset=_subset(message),
        request_mode=message.protocol_config.request_body_mode if has_modes else FULL_DUPLEX_STREAMED,
        response_mode=message.protocol_config.response_body_mode if has_modes else FULL_DUPLEX_STREAMED,
    )


def served_of(message: ProcessingRequest) -> str:
    """Return the endpoint that has served the request, as the gateway reports it; empty: it does not."""
    found = _metadata(message, LB).get(SERVED)
    return found.string_value if found is not None else ""


def _headers(message: HttpHeaders) -> Iterator[tuple[str, bytes]]:
    for header in message.headers.headers:
        yield header.key.lower(), header.raw_value or header.value.encode()


def _metadata(message: ProcessingRequest, namespace: str) -> Mapping[str, Value]:
    """Return the entries of a namespace; empty: there is none."""
    if namespace not in message.metadata_context.filter_metadata:  # reading would add it
        return {}
    return message.metadata_context.filter_metadata[namespace].fields


def _subset(message: ProcessingRequest) -> Subset | None:
    """Return the subset hint: a list of endpoints, or one text with commas. Other values match no router."""
    if (hint := _metadata(message, SUBSET_HINT).get(SUBSET)) is None:
        return None
    texts = [each.string_value for each in (hint, *hint.list_value.values)]
    return Subset.of(entry for text in texts for entry in text.split(","))


def picked_at_headers(endpoints: Sequence[str]) -> ProcessingResponse:
    """Return the response to a request's headers that names the endpoints."""
    return ProcessingResponse(
        request_headers=HeadersResponse(response=_naming(endpoints)), dynamic_metadata=_destination(endpoints)
    )


def picked_at_body(endpoints: Sequence[str]) -> ProcessingResponse:
    """Return the response to a whole body that names the endpoints."""
    return ProcessingResponse(
        request_body=BodyResponse(response=_naming(endpoints)), dynamic_metadata=_destination(endpoints)
    )


def picked_at_trailers(endpoints: Sequence[str]) -> ProcessingResponse:
    """Return the response to trailers that names the endpoints in the metadata, as it is too late for headers."""
    return ProcessingResponse(
        request_trailers=TrailersResponse(header_mutation=HeaderMutation()), dynamic_metadata=_destination(endpoints)
    )


def _naming(endpoints: Sequence[str]) -> CommonResponse:
    # Without the last argument, the gateway would keep a route that it has chosen before it knew the endpoint.
    return CommonResponse(header_mutation=_set({DESTINATION: ",".join(endpoints)}), clear_route_cache=True)


def _destination(endpoints: Sequence[str]) -> Struct:
    found = Struct()
    found.update({LB: {DESTINATION: ",".join(endpoints)}})
    return found


def _set(headers: Mapping[str, str]) -> HeaderMutation:
    """Return a mutation that replaces headers: a client may have sent some of the same names."""
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name, raw_value=value.encode()),
                append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers.items()
        ]
    )


def unchanged(message: ProcessingRequest) -> ProcessingResponse:
    """Return the response that changes nothing. For a body, only in modes in which the gateway keeps the body."""
    match message.WhichOneof("request"):
        case "request_headers":
            return ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))
        case "response_headers":
            return ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse()))
        case "request_body":
            return ProcessingResponse(request_body=BodyResponse(response=CommonResponse()))
        case "response_body":
            return ProcessingResponse(response_body=BodyResponse(response=CommonResponse()))
        case "request_trailers":
            return ProcessingResponse(request_trailers=TrailersResponse(header_mutation=HeaderMutation()))
    return ProcessingResponse(response_trailers=TrailersResponse(header_mutation=HeaderMutation()))


def pieces_of(body: bytes) -> list[bytes]:
    """Split a part of a body into pieces of at most MAX_PIECE; an empty part is one piece."""
    return [body[at : at + MAX_PIECE] for at in range(0, len(body), MAX_PIECE)] or [b""]


def request_piece(piece: bytes, is_last: bool) -> ProcessingResponse:
    """Return a response with a piece of the request's body, which the gateway forwards."""
    return ProcessingResponse(request_body=_streamed(piece, is_last))


def response_piece(piece: bytes, is_last: bool) -> ProcessingResponse:
    """Return a response with a piece of the response's body, which the gateway forwards."""
    return ProcessingResponse(response_body=_streamed(piece, is_last))


def _streamed(piece: bytes, is_last: bool) -> BodyResponse:
    streamed = StreamedBodyResponse(body=piece, end_of_stream=is_last)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))


def refusal(error: BatonError, path: str = "", request_id: str = "") -> ProcessingResponse:
    """Return the response with which the gateway answers its client, in the format of the API of `path`."""
    headers = {"content-type": "application/json"}
    if request_id:
        headers[REQUEST_ID] = request_id
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.http),
            headers=_set(headers),
            body=ascii_json(error_body(path, error, request_id)),
            details="baton_endpoint_picker",
        )
    )
