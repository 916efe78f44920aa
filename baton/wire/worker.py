"""Contract of routers and workers (`worker.proto`): the commands of one stream, and the events that answer them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton import messages as m
from baton.blocks import KEY_BYTES
from baton.errors import BatonError, InvalidRequest, TransferRefused, Unsupported
from baton.hypotheses import NO_HYPOTHESES, Beam, Hypotheses
from baton.images import MAX_IMAGES, MAX_REQUEST_BYTES
from baton.sampling import FinishReason
from baton.scores import NO_SCORES, TokenScores
from baton.structure import MAX_GRAMMAR_BYTES, MAX_STRUCTURE_CHOICES
from baton.v1 import worker_pb2
from baton.wire.convert import MAX_CONTROL_BYTES, Oneof, fields_in, from_pb, require_short, to_pb, unknown_field
from baton.wire.inference import sampling_from_pb, write_sampling

MAX_COMMANDS = 1024
"""Maximum commands in one frame of any router."""
MAX_FRAME_COMMANDS = 16
"""Commands in one frame of a router: a worker accepts messages with this many prompts of maximum length."""
MAX_TOKEN_BYTES = 5
MAX_STRUCTURE_BYTES = MAX_GRAMMAR_BYTES + 8 * MAX_STRUCTURE_CHOICES
"""Longest structure of an output, in bytes, including the encoding of each choice."""
MAX_HYPOTHESES_BYTES = 2**20
"""Largest state of a beam search that is sent to another worker."""


def write_sequence(spec: m.SequenceSpec, message: worker_pb2.SequenceSpec) -> None:
    """Encode a sequence into an empty message, in place.

    A message that is passed to another one's constructor is copied with all its tokens.
    """
    message.request_id = spec.request_id
    message.choice_index = spec.choice_index
    message.token_ids.extend(spec.token_ids)
    message.num_prompt_tokens = spec.num_prompt_tokens
    write_sampling(spec.sampling, message.sampling)
    message.cache_seed = spec.cache_seed
    message.attempt = spec.attempt
    message.priority = spec.priority
    message.ttft_s = spec.ttft_s
    message.itl_s = spec.itl_s
    message.num_expected_tokens = spec.num_expected_tokens
    if spec.hypotheses != NO_HYPOTHESES:
        message.hypotheses.CopyFrom(to_pb(spec.hypotheses, worker_pb2.Hypotheses))
    if spec.adapter is not None:
        message.adapter.CopyFrom(to_pb(spec.adapter, worker_pb2.Adapter))
    if spec.images:
        message.images.extend(to_pb(image, worker_pb2.PlacedImage) for image in spec.images)


def sequence_from_pb(message: worker_pb2.SequenceSpec) -> m.SequenceSpec:
    """Decode a sequence.

    Raises:
        InvalidRequest, Unsupported: its sampling is out of range, or of a newer release.
    """
    return m.SequenceSpec(
        request_id=message.request_id,
        choice_index=message.choice_index,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_pb(message.sampling),
        cache_seed=message.cache_seed,
        attempt=message.attempt,
        priority=message.priority,
        ttft_s=message.ttft_s,
        itl_s=message.itl_s,
        num_expected_tokens=message.num_expected_tokens,
        hypotheses=from_pb(message.hypotheses, Hypotheses) if message.HasField("hypotheses") else NO_HYPOTHESES,
        adapter=from_pb(message.adapter, m.Adapter) if message.HasField("adapter") else None,
        images=tuple(from_pb(image, m.PlacedImage) for image in message.images),
    )


def fields_of(spec: m.SequenceSpec) -> set[str]:
    """Return the set fields of a sequence when it is sent to a worker, as `fields_in` names them."""
    message = worker_pb2.SequenceSpec()
    write_sequence(spec, message)
    return fields_in(message)


def ticket_to_pb(ticket: m.Ticket) -> worker_pb2.Ticket:
    """Encode a ticket."""
    return to_pb(ticket, worker_pb2.Ticket)


def ticket_from_pb(message: worker_pb2.Ticket) -> m.Ticket:
    """Decode a ticket. Raises TransferRefused for one that is too long."""
    require_short(message, MAX_CONTROL_BYTES, TransferRefused)
    return from_pb(message, m.Ticket)


def start_command(start: m.StartCall) -> worker_pb2.Command:
    """Return the command that opens a call."""
    command = worker_pb2.Command(call_id=start.call_id, trace=start.trace)
    request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest | worker_pb2.FetchRequest
    match start.request:
        case m.PrefillRequest(sequence, ticket, source, images):
            request = command.prefill
            request.images.extend(images)
            if ticket is not None:
                request.ticket.CopyFrom(ticket_to_pb(ticket))
        case m.DecodeRequest(sequence, await_kv, source, images):
            request = command.decode
            request.await_kv = await_kv
            request.images.extend(images)
        case m.FetchRequest(sequence, source):
            request = command.fetch
        case None | BatonError():
            raise AssertionError("a router knows what it asks for")
    write_sequence(sequence, request.sequence)
    if source is not None:
        request.source.CopyFrom(to_pb(source, worker_pb2.PrefixSource))
    return command


def cancel_command(cancel: m.CancelCall) -> worker_pb2.Command:
    """Return the command that cancels a call."""
    return worker_pb2.Command(call_id=cancel.call_id, cancel=worker_pb2.Cancel())


def serve_request(commands: Iterable[worker_pb2.Command]) -> worker_pb2.ServeRequest:
    """Return a router's frame of commands."""
    return worker_pb2.ServeRequest(commands=commands)


def commands(message: worker_pb2.ServeRequest, max_model_len: float = math.inf) -> list[m.StartCall | m.CancelCall]:
    """Decode a router's frame. A start that is too long or of a newer release is not read; it holds its error.

    Args:
        max_model_len: maximum number of tokens of a sequence on this worker.

    Raises:
        InvalidRequest: the frame has more commands than a router writes at a time.
    """
    if len(message.commands) > MAX_COMMANDS:
        raise InvalidRequest(f"a frame has {len(message.commands)} commands; a worker takes {MAX_COMMANDS} at a time")
    return [_command(command, max_model_len) for command in message.commands]


def max_start_bytes(max_model_len: float, rest_bytes: int = MAX_STRUCTURE_BYTES + MAX_HYPOTHESES_BYTES) -> float:
    """Return the longest start of a call that a worker reads, in bytes.

    Args:
        rest_bytes: the size of the output's structure and the state of its search.
    """
    return MAX_CONTROL_BYTES + MAX_TOKEN_BYTES * max_model_len + rest_bytes


def may_travel(hypotheses: Hypotheses) -> bool:
    """Return whether the state of a search is small enough for another worker to read."""
    return to_pb(hypotheses, worker_pb2.Hypotheses).ByteSize() <= MAX_HYPOTHESES_BYTES


def _command(message: worker_pb2.Command, max_model_len: float) -> m.StartCall | m.CancelCall:
    if message.WhichOneof("command") == "cancel":
        return m.CancelCall(message.call_id)
    try:
        require_short(message, max_start_bytes(max_model_len, _rest_bytes(message)), InvalidRequest)
        if path := unknown_field(message):
            raise Unsupported(f"this worker does not know the field {path} of a router's command")
        return m.StartCall(message.call_id, _call_request(message), dict(message.trace))
    except (InvalidRequest, TransferRefused, Unsupported) as refusal:
        return m.StartCall(message.call_id, refusal, {})


def _rest_bytes(message: worker_pb2.Command) -> int:
    """Return the allowed size in addition to the tokens: the actual size, up to its limits."""
    which = message.WhichOneof("command")
    if which not in ("prefill", "decode", "fetch"):
        return 0
    sequence = getattr(message, which).sequence
    structure_bytes = min(int(sequence.sampling.structured_outputs.ByteSize()), MAX_STRUCTURE_BYTES)
    rest_bytes = structure_bytes + min(int(sequence.hypotheses.ByteSize()), MAX_HYPOTHESES_BYTES)
    if which != "fetch" and (images := getattr(message, which).images):
        rest_bytes += min(sum(map(len, images)), MAX_REQUEST_BYTES)
    return rest_bytes


def _call_request(message: worker_pb2.Command) -> m.PrefillRequest | m.DecodeRequest | m.FetchRequest | None:
    match message.WhichOneof("command"):
        case "prefill":
            prefill = message.prefill
            ticket = ticket_from_pb(prefill.ticket) if prefill.HasField("ticket") else None
            images = _images_from_pb(prefill)
            return m.PrefillRequest(sequence_from_pb(prefill.sequence), ticket, _source_from_pb(prefill), images)
        case "decode":
            decode = message.decode
            images, source = _images_from_pb(decode), _source_from_pb(decode)
            return m.DecodeRequest(sequence_from_pb(decode.sequence), decode.await_kv, source, images)
        case "fetch":
            fetch = message.fetch
            return m.FetchRequest(sequence_from_pb(fetch.sequence), from_pb(fetch.source, m.PrefixSource))
    return None


def _source_from_pb(message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> m.PrefixSource | None:
    return from_pb(message.source, m.PrefixSource) if message.HasField("source") else None


def _images_from_pb(
    message: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest | worker_pb2.LookRequest,
) -> tuple[bytes, ...]:
    if len(message.images) > MAX_IMAGES:
        raise InvalidRequest(f"a message has {len(message.images)} images; a worker takes {MAX_IMAGES} at a time")
    return tuple(message.images)


def look_request(images: Iterable[bytes], cache_seed: bytes) -> worker_pb2.LookRequest:
    """Encode a router's question about images."""
    return worker_pb2.LookRequest(images=images, cache_seed=cache_seed)


def looked_at(message: worker_pb2.LookRequest) -> tuple[tuple[bytes, ...], bytes]:
    """Decode a router's question about images: the images and the cache seed.

    Raises:
        InvalidRequest: they are too many, or too long, or the cache seed is.
    """
    require_short(message, MAX_REQUEST_BYTES + MAX_CONTROL_BYTES, InvalidRequest)
    if len(message.cache_seed) > KEY_BYTES:
        raise InvalidRequest(f"cache_seed must have at most {KEY_BYTES} bytes")
    return _images_from_pb(message), message.cache_seed


def look_response(seen: Iterable[m.SeenImage]) -> worker_pb2.LookResponse:
    """Encode a worker's answer about images."""
    return worker_pb2.LookResponse(images=(to_pb(each, worker_pb2.SeenImage) for each in seen))


def seen_images(message: worker_pb2.LookResponse) -> tuple[m.SeenImage, ...]:
    """Decode a worker's answer about images."""
    return tuple(from_pb(each, m.SeenImage) for each in message.images)


_EVENTS = Oneof(
    worker_pb2.Event,
    "event",
    first_token=m.FirstToken,
    transferred=m.Transferred,
    ticket=m.Ticket,
    fetched=m.Fetched,
    migrate=m.Migrate,
    failed=m.Failed,
    ended=m.CallEnded,
)
"""All events but `NewTokens`, which is sent with each token and converted by explicit code."""


def serve_response(events: Iterable[tuple[int, m.Event]]) -> worker_pb2.ServeResponse:
    """Return a worker's frame of events, each with the id of its call."""
    response = worker_pb2.ServeResponse()
    for call_id, event in events:
        if isinstance(event, m.NewTokens):
            tokens = response.events.add(call_id=call_id).new_tokens
            tokens.token_ids.extend(event.token_ids)
            tokens.finish_reason = event.finish_reason or ""
            if event.report is not None:
                tokens.report.CopyFrom(to_pb(event.report, worker_pb2.PrefillReport))
            if event.scores:
                tokens.scores.CopyFrom(to_pb(event.scores, worker_pb2.TokenScores))
            if event.beams:
                tokens.beams.extend(to_pb(beam, worker_pb2.Beam) for beam in event.beams)
            if event.num_searched:
                tokens.num_searched = event.num_searched
        else:
            response.events.add(call_id=call_id, **_EVENTS.to_field(event))
    return response


def events(message: worker_pb2.ServeResponse) -> list[tuple[int, m.Event | None]]:
    """Decode a worker's frame: events, each with the id of its call; None: a kind that this version does not know."""
    return [(event.call_id, _event(event)) for event in message.events]


def _event(message: worker_pb2.Event) -> m.Event | None:
    if message.WhichOneof("event") == "new_tokens":
        tokens = message.new_tokens
        finish_reason = tokens.finish_reason
        return m.NewTokens(
            token_ids=tuple(tokens.token_ids),
            finish_reason=FinishReason(finish_reason) if finish_reason else None,
            report=from_pb(tokens.report, m.PrefillReport) if tokens.HasField("report") else None,
            scores=from_pb(tokens.scores, TokenScores) if tokens.HasField("scores") else NO_SCORES,
            beams=tuple(from_pb(beam, Beam) for beam in tokens.beams) if tokens.beams else (),
            num_searched=tokens.num_searched,
        )
    event: m.Event | None = _EVENTS.value_of(message)
    return event
