"""Images as APIs carry them: what is one, and what is refused, before anything decodes it."""

from __future__ import annotations

import base64

import pytest

from baton import wire
from baton.api import Chat, GenerateRequest
from baton.chat import ChatMessage
from baton.errors import BatonError, InvalidRequest, Unsupported
from baton.images import MAX_IMAGE_BYTES, check_image, image_in_base64, image_in_url
from baton.messages import DecodeRequest, PrefillRequest, SeenImage, StartCall
from baton.tasks import Outbox
from baton.v1 import inference_pb2, worker_pb2
from tests.support.builders import sequence_spec
from tests.support.eyes import PNG, data_url, picture

FILES = {
    "image/png": PNG + b"rest",
    "image/jpeg": b"\xff\xd8\xff\xe0rest",
    "image/webp": b"RIFF\x10\0\0\0WEBPrest",
    "image/gif": b"GIF89arest",
}
GOOD = base64.b64encode(FILES["image/png"]).decode()


@pytest.mark.parametrize("media_type", FILES)
def test_a_data_url_holds_an_image(media_type: str) -> None:
    file = FILES[media_type]
    assert image_in_url(data_url(file, media_type), "url") == file
    assert image_in_url("DATA:" + data_url(file, media_type.upper())[5:], "url") == file
    assert image_in_base64(base64.b64encode(file).decode(), media_type, "data") == file


def test_jpg_is_another_name_of_jpeg() -> None:
    assert image_in_url(data_url(FILES["image/jpeg"], "image/jpg"), "url") == FILES["image/jpeg"]


@pytest.mark.parametrize(
    ("url", "error", "sentence"),
    [
        ("https://cat.example/cat.png", Unsupported, "the router fetches no URL"),
        ("http://169.254.169.254/", Unsupported, "the router fetches no URL"),
        ("file:///etc/passwd", Unsupported, "the router fetches no URL"),
        ("", Unsupported, "the router fetches no URL"),
        (7, InvalidRequest, "must be a string"),
        (None, InvalidRequest, "must be a string"),
        ("data:image/png," + GOOD, InvalidRequest, "must have the form"),
        ("data:image/png;base64", InvalidRequest, "must have the form"),
        ("data:image/png;base32," + GOOD, InvalidRequest, "must have the form"),
        ("data:" + "a" * 10_000 + ";base64," + GOOD, InvalidRequest, "must have the form"),
        ("data:image/bmp;base64," + GOOD, Unsupported, "must have a media type out of image/png"),
        ("data:image/svg+xml;base64," + GOOD, Unsupported, "must have a media type out of"),
        ("data:;base64," + GOOD, Unsupported, "must have a media type out of"),
        ("data:image/png;base64," + GOOD[:-1], InvalidRequest, "not valid base64"),
        ("data:image/png;base64,\n" + GOOD, InvalidRequest, "not valid base64"),
        ("data:image/png;base64," + GOOD[:12] + "\n\n\n\n" + GOOD[12:], InvalidRequest, "not valid base64"),
        ("data:image/png;base64," + GOOD[:12] + "-_-_" + GOOD[12:], InvalidRequest, "not valid base64"),
        ("data:image/png;base64," + GOOD + "=", InvalidRequest, "not valid base64"),
        ("data:image/png;base64," + GOOD.replace("/", "_") + "_", InvalidRequest, "not valid base64"),
        ("data:image/png;base64,é", InvalidRequest, "not valid base64"),
        ("data:image/png;base64,", InvalidRequest, "is not a PNG, JPEG, WebP or GIF image"),
        ("data:image/png;base64," + base64.b64encode(b"BM" + bytes(60)).decode(), InvalidRequest, "is not a PNG"),
        ("data:image/png;base64," + base64.b64encode(b"RIFF\0\0\0\0WAVE").decode(), InvalidRequest, "is not a PNG"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_by_its_place(url: object, error: type[BatonError], sentence: str) -> None:
    with pytest.raises(error, match=sentence) as refusal:
        image_in_url(url, "messages[0].url")
    assert type(refusal.value) is error
    assert refusal.value.param == "messages[0].url"  # type: ignore[attr-defined]


def test_the_size_of_an_image_is_limited() -> None:
    largest = PNG + bytes(MAX_IMAGE_BYTES - len(PNG))
    check_image(largest, "x")
    for too_large in (
        lambda: check_image(largest + b"\0", "x"),
        lambda: image_in_base64(base64.b64encode(largest + bytes(16)).decode(), "image/png", "x"),
    ):
        with pytest.raises(InvalidRequest, match=str(MAX_IMAGE_BYTES)):
            too_large()


PARTS = ("see", picture("a"), "and", picture("b"))
MESSAGE = ChatMessage(role="user", content="see\nand", parts=PARTS)


def test_a_message_with_images_shows_no_bytes() -> None:
    assert "PNG" not in repr(MESSAGE)
    assert "PNG" not in repr(Chat(messages=(MESSAGE,)))


def test_images_of_a_chat_travel_to_the_router() -> None:
    request = GenerateRequest(prompt=Chat(messages=(MESSAGE, ChatMessage(role="assistant", content="so"))))
    sent = wire.generate_request(request)
    read = wire.generate_request_from_pb(inference_pb2.GenerateRequest.FromString(sent.SerializeToString()), 100)
    assert read.prompt == request.prompt
    assert isinstance(read.prompt, Chat)
    assert read.prompt.images == (PARTS[1], PARTS[3])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"content": "x", "parts": [{"text": "y"}]}, "has both content and parts"),
        ({"parts": [{}]}, r"parts\[0\] is empty"),
        ({"parts": [{"text": "y"}, {"image": b"no"}]}, r"messages\[0\].parts\[1\].image is not a PNG"),
        ({"role": "assistant", "parts": [{"image": PNG}]}, "role assistant has an image"),
        ({"role": "system", "parts": [{"image": PNG}]}, "role system has an image"),
    ],
)
def test_parts_that_cannot_be_are_refused(fields: dict[str, object], sentence: str) -> None:
    message = inference_pb2.ChatMessage(**{"role": "user", **fields})  # type: ignore[arg-type]
    chat = inference_pb2.ChatInput(messages=[message])
    with pytest.raises(InvalidRequest, match=sentence):
        wire.generate_request_from_pb(inference_pb2.GenerateRequest(chat=chat), 100)


def test_parts_of_text_alone_are_a_text() -> None:
    message = inference_pb2.ChatMessage(
        role="system", parts=[inference_pb2.ContentPart(text="a"), inference_pb2.ContentPart(text="b")]
    )
    chat = inference_pb2.ChatInput(messages=[message])
    prompt = wire.generate_request_from_pb(inference_pb2.GenerateRequest(chat=chat), 100).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == (ChatMessage(role="system", content="a\nb"),)


# -- between router and worker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_call_carries_images_beyond_the_length_of_others(kind: str) -> None:
    spec, images = sequence_spec(range(20)), (bytes(8 * 2**20), PNG)
    request = (
        PrefillRequest(spec, None, None, images) if kind == "prefill" else DecodeRequest(spec, False, None, images)
    )
    (read,) = wire.commands(wire.serve_request([wire.start_command(StartCall(1, request, {}))]), 100)
    assert isinstance(read, StartCall)
    assert read.request == request
    assert "8388608" not in repr(request)


@pytest.mark.parametrize("images", [[bytes(25 * 2**20)], [b""] * 65], ids=["too long", "too many"])
def test_a_worker_reads_no_more_images_than_a_request_has(images: list[bytes]) -> None:
    request = PrefillRequest(sequence_spec(range(20)), None, None, tuple(images))
    (read,) = wire.commands(wire.serve_request([wire.start_command(StartCall(1, request, {}))]), 100)
    assert isinstance(read, StartCall)
    assert isinstance(read.request, InvalidRequest)
    with pytest.raises(InvalidRequest):
        wire.looked_at(wire.look_request(images, b""))


def test_a_worker_reads_the_images_of_a_cache_scope() -> None:
    assert wire.looked_at(wire.look_request([b"cat", b"dog"], b"s" * 16)) == ((b"cat", b"dog"), b"s" * 16)
    with pytest.raises(InvalidRequest, match="cache_seed must have at most 16 bytes"):
        wire.looked_at(wire.look_request([b"cat"], b"s" * 17))


def test_what_a_worker_sees_travels_back() -> None:
    seen = (
        SeenImage(digest=b"d" * 16, grid=(1, 2, 3), token_ids=(7, 7, 8)),
        SeenImage(digest=b"", grid=(), token_ids=()),
    )
    answer = wire.look_response(seen)
    assert wire.seen_images(worker_pb2.LookResponse.FromString(answer.SerializeToString())) == seen


def test_a_worker_of_an_older_release_does_not_know_a_calls_images() -> None:
    request = PrefillRequest(sequence_spec(range(20)), None, None, (PNG,))
    assert "PrefillRequest.4" in wire.fields_in(wire.start_command(StartCall(1, request, {})))
    assert "PrefillRequest.4" in wire.fields_unknown_to("Command:1,2")


async def test_a_command_that_fills_a_frame_is_alone_in_it() -> None:
    outbox = Outbox[str]()
    for name in ("a", "b", "LONG", "c", "LONG", "LONGER", "d"):
        outbox.put(name, fills_frame=name.startswith("LONG"))
    frames = [await outbox.take(16) for _ in range(6)]
    assert frames == [["a", "b"], ["LONG"], ["c"], ["LONG"], ["LONGER"], ["d"]]
    for name in ("a", "b", "c", "LONG"):
        outbox.put(name, fills_frame=name.startswith("LONG"))
    assert [await outbox.take(2) for _ in range(3)] == [["a", "b"], ["c"], ["LONG"]]
