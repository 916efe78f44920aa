"""Streams an answer over gRPC and continues it on another router when the connection breaks.

    python examples/grpc_resume.py 127.0.0.1:50051,127.0.0.1:50052 "Once upon a time"

`stream` below does what a client must do: send the same request again, with the `request_id` from the response and the
number of tokens that it has of each choice. The stream continues after those tokens, with the same text that an
unbroken stream would have had. `baton generate` does this automatically.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc

TRIES = 5
PAUSE_S = 0.5


def stream(addresses: list[str], request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateResponse]:
    """Yield each message once, however many routers die.

    Raises:
        grpc.RpcError: the request was refused, or TRIES routers in a row could not be reached.
    """
    request.request_id = request.request_id or f"example-{uuid.uuid4().hex}"
    num_failures = 0
    router = 0
    while True:
        with grpc.insecure_channel(addresses[router % len(addresses)]) as channel:
            try:
                for message in inference_pb2_grpc.InferenceStub(channel).Generate(request):
                    request.resume_from[message.choice_index] += len(message.token_ids)
                    num_failures = 0
                    yield message
                return
            except grpc.RpcError as error:
                num_failures += 1
                if error.code() is not grpc.StatusCode.UNAVAILABLE or num_failures == TRIES:
                    raise
        print("\n[the connection broke; continuing on another router]", file=sys.stderr)
        router += 1
        time.sleep(PAUSE_S)


def main(addresses: str, text: str) -> None:
    request = inference_pb2.GenerateRequest(
        text=text, sampling=inference_pb2.SamplingParams(max_tokens=128, temperature=0.8, seed=7)
    )
    for message in stream(addresses.split(","), request):
        print(message.text, end="", flush=True)
        if message.HasField("usage"):
            print(f"\n[{message.usage.completion_tokens} tokens, decoded by {message.timing.decode_worker}]")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["127.0.0.1:50051", "Once upon a time"]))
