"""Streams a chat with the OpenAI client.

    python examples/openai_client.py "What is the capital of France?"

It connects to http://127.0.0.1:8000/v1, or to OPENAI_BASE_URL if that is set, with the key in OPENAI_API_KEY if there
is one.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(question: str) -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated]")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "What is the capital of France?")
