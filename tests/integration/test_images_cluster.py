"""A cluster of real processes answers chats with images like transformers' `generate`, also as a worker leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import psutil
import pytest

from baton.v1 import inference_pb2
from tests.integration.cluster import Answer, Cluster, running_cluster
from tests.integration.test_engine_models import Reference, same_up_to_near_ties
from tests.support.asking import sampling
from tests.support.eyes import data_url
from tests.support.load import Stream
from tests.support.model_folders import backend
from tests.support.pictures import IMAGE, MARKS, picture, refer, save_with_eyes, written
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.first, pytest.mark.integration]

KIND = "smolvlm"
NUM_TOKENS = 400
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    f"{IMAGE}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
)
Part = str | bytes
CAT, DOG = picture(1), picture(2, 80, 190)
ASKED: tuple[tuple[Part, ...], ...] = (
    ("What is this? ", CAT, "Say it in one word."),
    (DOG, "and", CAT, "differ. How?"),
    ("There is no image here.",),
)


@dataclass(frozen=True, kw_only=True)
class Seeing:
    cluster: Cluster
    references: list[Reference]

    def ask(self, parts: tuple[Part, ...], num_tokens: int) -> Answer:
        return self.cluster.generate(chat=chat_of(parts), sampling=sampling(num_tokens))


def chat_of(parts: tuple[Part, ...]) -> inference_pb2.ChatInput:
    given = [
        inference_pb2.ContentPart(text=part) if isinstance(part, str) else inference_pb2.ContentPart(image=part)
        for part in parts
    ]
    return inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", parts=given)])


def token_ids(parts: tuple[Part, ...]) -> list[int | bytes]:
    tokenizer, found = backend(MARKS), list[int | bytes]()
    for part in parts:
        found += [part] if isinstance(part, bytes) else tokenizer.encode(part, add_special_tokens=False).ids
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp(KIND)
    model = save_with_eyes(KIND, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    references = [refer(model, written(KIND, token_ids(parts)), NUM_TOKENS) for parts in ASKED]
    with running_cluster(
        *("--model", str(folder)),
        cluster_decode="2",
        engine_num_blocks="256",
        engine_max_num_batched_tokens="48",
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        yield Seeing(cluster=cluster, references=references)


def test_answers_are_those_of_transformers(served: Seeing) -> None:
    for parts, reference in zip(ASKED, served.references, strict=True):
        first, again = (served.ask(parts, 12) for _ in range(2))
        num_prompt = len(written(KIND, token_ids(parts)).token_ids)
        assert first.usage.prompt_tokens == num_prompt
        assert first.timing.mode == "disaggregated"
        for answer in (first, again):
            same_up_to_near_ties(answer.token_ids, Reference(reference.tokens[:12], reference.margins[:12]))
        assert again.usage.cached_tokens >= (num_prompt - 1) // 16 * 16, "the same image hits"
    other = served.ask((ASKED[0][0], picture(5), *ASKED[0][2:]), 4)
    assert other.usage.cached_tokens <= len(token_ids((ASKED[0][0],))), "another one of its size does not"


def test_openais_client_sends_images_unmodified(served: Seeing) -> None:
    client = openai.OpenAI(base_url=f"http://{served.cluster.http}/v1", api_key="none")
    content: list[Any] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in ASKED[0]
    ]
    answer = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": content}],
        max_tokens=12,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    expected = backend(MARKS).decode(served.references[0].tokens[:12])
    assert answer.choices[0].message.content == expected
    content[1]["image_url"]["url"] = data_url(CAT[:200])
    with pytest.raises(openai.BadRequestError, match="image"):
        client.chat.completions.create(model="", messages=[{"role": "user", "content": content}], max_tokens=2)
    content[1]["image_url"]["url"] = "https://example.org/cat.png"
    with pytest.raises(openai.BadRequestError, match="data"):
        client.chat.completions.create(model="", messages=[{"role": "user", "content": content}], max_tokens=2)


@pytest.mark.chaos
@pytest.mark.parametrize("end", [psutil.Process.terminate, psutil.Process.kill])
def test_answers_go_on_as_a_worker_leaves(end: Callable[[psutil.Process], None], served: Seeing) -> None:
    cluster = served.cluster
    cluster.wait_for(lambda status: status["pools"]["decode"]["ready"] == 2 and len(status["workers"]) == 3)
    streams = [
        Stream(
            inference=cluster.inference,
            prompt=[],
            max_tokens=NUM_TOKENS,
            fields={"chat": chat_of(parts), "request_id": f"{end.__name__}-{number}"},
            timeout_s=240,
        ).start()
        for number, parts in enumerate(ASKED)
    ]
    wait_until(lambda: all(len(each.tokens) >= 10 for each in streams), 60.0, every_s=0.005)
    on = [cluster.client.explain(f"{end.__name__}-{number}")[0].decode_worker for number in range(len(streams))]
    leaver = max(on, key=on.count)
    end(psutil.Process(cluster.worker(leaver)["pid"]))
    most = max(len(each.tokens) for each in streams)
    same = []
    for stream, reference in zip(streams, served.references, strict=True):
        assert stream.wait().error is None
        same.append(same_up_to_near_ties(stream.tokens, reference))
    print(f"{end.__name__}: {on.count(leaver)} of {len(on)} on {leaver}, after {most} tokens at most; same: {same}")
    assert most < NUM_TOKENS, "the worker was to end in the midst of its answers"
    assert leaver not in {each.timing.decode_worker for each in streams}
