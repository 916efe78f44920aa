"""The real model through router, prefill worker and decode worker in processes of their own, against transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton import wire
from baton.api import GenerateChunk, GenerateRequest, Text
from baton.scores import TokenScores
from tests.chaos import asks
from tests.integration.cluster import Answer, Cluster, request, running_cluster
from tests.integration.test_prefix_pull import whole_blocks
from tests.support.asking import held_by, metric, sampling
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

NUM_AT_ONCE = 8
NUM_NEW_TOKENS = 8
NEAR_TIE = 5e-4
"""Two logits as close as this may swap places between batch shapes in float32."""
LONG_TEXT = "The library of Alexandria was one of the largest and most significant libraries of the ancient world. "


class Reference:
    """transformers' own `generate`, greedy, with the margin by which each token won."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        self._known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        key = (num_tokens, *prompt)
        if key not in self._known:
            self._known[key] = self._generate(prompt, num_tokens)
        return self._known[key]

    def _generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        out = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = [scores[0].topk(2).values for scores in out.scores]
        return out.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in best]

    def log_probabilities(self, prompt: list[int], answer: tuple[int, ...]) -> torch.Tensor:
        """Returns those of every token in the place of each token of the answer, `[tokens, vocabulary]`."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        found: torch.Tensor = logits.double().log_softmax(-1)
        return found


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    """30: almost empty, one token, exact blocks, two chunks, unicode, chats."""
    tokenizer = reference.tokenizer
    long_ids: list[int] = tokenizer.encode(LONG_TEXT * 120)
    texts = [
        " ", "a", "\n", "Hello", "The capital of France is", "def fibonacci(n):", "1 + 1 =", "Once upon a time",
        "Grüße aus München, schön dass du", "日本の首都は", "😀😃😄 means", "نص عربي قصير", "ёлка и снег",
        "SELECT * FROM users WHERE", "{\"name\": \"", "A list of fruits:\n1. Apple\n2.", "e\u0301 is the letter",
        "To be, or not to be, that is the", "The square root of 144 is",
    ]  # fmt: skip
    chats = [
        [{"role": "user", "content": "What is the capital of Italy?"}],
        [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "Sky colour?"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "Tell me a joke about 🐈."},
        ],
    ]
    result: list[list[int]] = [tokenizer.encode(text) for text in texts]
    result += [
        tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for chat in chats
    ]
    # One token; one block less one, exactly one, one more; two blocks; one chunk of 512, and one more.
    lengths = (1, 15, 16, 17, 32, 33, 512, 513)
    result += [long_ids[i : i + length] for i, length in enumerate(lengths)]
    assert len(result) >= 30
    return result


@pytest.fixture(scope="module")
def several_chunks(reference: Reference) -> list[int]:
    """A prompt of four chunks, which costs as much as all the others together."""
    token_ids: list[int] = reference.tokenizer.encode(LONG_TEXT * 120)
    return token_ids[8:2008]


def greedy(cluster: Cluster, prompt: list[int], num_tokens: int = NUM_NEW_TOKENS) -> Answer:
    return cluster.generate(token_ids=prompt, sampling={"temperature": 0, "max_tokens": num_tokens})


def num_excepted(got: list[int], want: list[int], margins: list[float]) -> int:
    """0 when equal, 1 when they part at a near tie. Anything else is a wrong token."""
    if got == want:
        return 0
    first = next(i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
    assert margins[first] <= NEAR_TIE, f"token {first}: {got} instead of {want}, won by {margins[first]}"
    return 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_tokens", [NUM_NEW_TOKENS, pytest.param(3 * NUM_NEW_TOKENS, marks=pytest.mark.chaos)])
def test_tokens_equal_generate(
    num_tokens: int, split_cluster: Cluster, reference: Reference, prompts: list[list[int]], several_chunks: list[int]
) -> None:
    prompts = [*prompts, several_chunks] if num_tokens > NUM_NEW_TOKENS else prompts[5::6]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: greedy(split_cluster, prompt, num_tokens), prompts))
    excepted = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.timing.mode == "disaggregated"
        assert [answer.timing.prefill_worker] == split_cluster.ids("prefill")
        assert [answer.timing.decode_worker] == split_cluster.ids("decode")
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(answer.token_ids)
        excepted += num_excepted(answer.token_ids, *reference.generate(prompt, num_tokens))
    print(f"{len(prompts)} prompts, {excepted} excepted at a near tie")
    assert excepted <= 2


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["corrupt_chunk=1", "drop_chunk=1", "swap_blocks=1"])
def test_spoiled_blocks_change_the_answer_when_nobody_checks(
    fault: str, model_dir: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    """Proof that the comparison above sees one wrong block: the same faults, with checksums off."""
    chosen = [prompt for prompt in prompts if 30 <= len(prompt) <= 40]
    with running_cluster(router_mode="disaggregated", transfer_checksum="off", testing_faults=fault) as cluster:
        answers = [greedy(cluster, prompt).token_ids for prompt in chosen]
    assert any(
        got != want
        for got, (want, _) in zip(answers, (reference.generate(p, NUM_NEW_TOKENS) for p in chosen), strict=True)
    )


@pytest.fixture(scope="module")
def spoiling_cluster(model_dir: Path) -> Iterator[Cluster]:
    """One worker a pool; of the blocks that are transferred some are spoiled, and the checksums tell."""
    faults = "corrupt_chunk=17,drop_chunk=23,swap_blocks=29"
    # While another is decoded there, nothing is computed on the decode worker that a KV transfer could bring.
    split_if_possible = json.dumps({"default": {"interference_weight": 1e12}})
    with running_cluster(testing_faults=faults, router_slo_classes=split_if_possible) as cluster:
        yield cluster


@pytest.mark.chaos
def test_spoiled_blocks_are_detected_and_recomputed(
    spoiling_cluster: Cluster, reference: Reference, prompts: list[list[int]]
) -> None:
    cluster = spoiling_cluster
    # A long prompt has more chunks than the faults let pass: its decode worker computes it in the end.
    chosen = [prompt for prompt in prompts if 16 <= len(prompt) <= 100 or len(prompt) == 513]
    another = cluster.inference.Generate(
        request(text="Once", sampling={"max_tokens": 8000, "ignore_eos": True}), timeout=600
    )
    [next(another) for _ in range(2)]  # so that what it meets itself is behind it
    before = num_corrupted(cluster)
    answers = [greedy(cluster, prompt) for prompt in chosen]
    counted = num_corrupted(cluster) - before
    another.cancel()
    cluster.wait_until_idle()
    for prompt, answer in zip(chosen, answers, strict=True):
        assert num_excepted(answer.token_ids, *reference.generate(prompt, NUM_NEW_TOKENS)) == 0
    assert sum(answer.timing.retries for answer in answers) > 0
    assert {answer.timing.mode for answer in answers} == {"disaggregated", "aggregated"}
    assert counted == sum(answer.timing.retries for answer in answers)


def num_corrupted(cluster: Cluster) -> int:
    return int(metric(cluster, "baton_retries_total", 'error="TransferCorrupted"'))


def test_the_same_prompt_again_is_cached(split_cluster: Cluster, reference: Reference) -> None:
    prompt = reference.tokenizer.encode("A prompt that nobody has sent before, " * 12)
    first, second = greedy(split_cluster, prompt, 4), greedy(split_cluster, prompt, 4)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert second.token_ids == first.token_ids


def test_log_probabilities_are_those_of_transformers(
    split_cluster: Cluster, reference: Reference, prompts: list[list[int]]
) -> None:
    """The first token, which the prefill worker draws, has them as those after it; whatever is made of the logits."""
    asked: dict[str, Any] = {"max_tokens": 4, "logprobs": 5, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    asked |= {"repetition_penalty": 1.3, "top_p": 0.9, "min_p": 0.02}

    def answer(prompt: list[int]) -> GenerateChunk:
        messages = split_cluster.generate(token_ids=prompt, sampling=asked).messages
        chunks = [wire.generate_chunk(message) for message in messages]
        token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
        scores = TokenScores.joined(chunk.scores for chunk in chunks)
        return GenerateChunk(request_id="", choice_index=0, token_ids=token_ids, scores=scores)

    chosen = prompts[:20:3]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(answer, chosen))
    for prompt, found in zip(chosen, answers, strict=True):
        expected = reference.log_probabilities(prompt, found.token_ids)
        assert len(found.scores) == 4
        for index, token_id in enumerate(found.token_ids):
            assert found.scores.logprobs[index] == pytest.approx(float(expected[index, token_id]), abs=1e-3)
            best = [logprob for _, logprob in found.scores.top(index)]
            assert best == pytest.approx(expected[index].topk(5).values.tolist(), abs=1e-3)
            own = [float(expected[index, top_id]) for top_id, _ in found.scores.top(index)]
            assert best == pytest.approx(own, abs=1e-3)


@pytest.mark.chaos
def test_log_probabilities_of_prompts_are_those_of_transformers(
    split_cluster: Cluster, reference: Reference, prompts: list[list[int]], several_chunks: list[int]
) -> None:
    """From a cold cache and from one that has the prompt, of which nothing is taken; also in two steps."""
    chosen = [*prompts[2:10], prompts[-3], several_chunks[:140]]
    for prompt in chosen:
        expected = reference.log_probabilities(prompt[:1], tuple(prompt[1:]))
        for _ in range(2):
            sampling = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 3}
            answer = split_cluster.generate(token_ids=prompt, sampling=sampling)
            assert answer.usage.cached_tokens == 0
            (found,) = [each for m in answer.messages if (each := wire.generate_chunk(m).prompt_scores) is not None]
            assert found.token_ids == tuple(prompt)
            own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            assert found.scores.logprobs == pytest.approx(own.tolist(), abs=1e-3)
            assert found.scores.top_logprobs == pytest.approx(expected.topk(3).values.flatten().tolist(), abs=1e-3)


def test_a_client_that_evaluates_gets_the_prompts_log_probabilities(
    split_cluster: Cluster, reference: Reference
) -> None:
    """As lm-eval asks: token ids, echoed, with one likeliest token each."""
    text = "The capital of France is Paris 😀."
    ids = reference.tokenizer.encode(text)
    expected = reference.log_probabilities(ids[:1], tuple(ids[1:]))
    own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    asked: Any = {"model": "", "max_tokens": 1, "temperature": 0, "seed": 1, "echo": True, "logprobs": 1}
    with openai.OpenAI(base_url=f"http://{split_cluster.http}/v1", api_key="none") as client:
        wholes = [client.completions.create(prompt=prompt, **asked) for prompt in ([ids], text)]
        streamed = list(client.completions.create(prompt=text, stream=True, **asked))
        echoed = client.completions.create(prompt=text, model="", max_tokens=1, temperature=0, echo=True)
        both: Any = client.completions.create(prompt=text, n=2, **asked | {"temperature": 1})
        chat: Any = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, extra_body={"prompt_logprobs": 1}
        )
    for whole in wholes:
        (choice,) = whole.choices
        scores = choice.logprobs
        assert scores is not None
        assert scores.token_logprobs is not None
        assert scores.top_logprobs is not None
        assert choice.text.startswith(text)
        assert scores.token_logprobs[0] is None
        assert scores.token_logprobs[1:-1] == pytest.approx(own, abs=1e-3)
        is_greedy = [
            max(top.values()) == top[token]
            for top, token in zip(scores.top_logprobs[1:-1], scores.tokens[1:-1], strict=True)
        ]
        assert is_greedy == [int(row.argmax()) == token for row, token in zip(expected, ids[1:], strict=True)]
        assert len(scores.text_offset or []) == len(scores.tokens or []) == len(ids) + 1
    parts = [part.choices[0] for part in streamed if part.choices]
    assert "".join(part.text for part in parts) == wholes[0].choices[0].text
    assert [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs or []][1:-1] == (
        pytest.approx(own, abs=1e-3)
    )
    assert echoed.choices[0].text == wholes[0].choices[0].text
    assert echoed.choices[0].logprobs is None
    assert [choice.logprobs.token_logprobs[1:-1] for choice in both.choices] == [pytest.approx(own, abs=1e-3)] * 2
    first, *rest = chat.prompt_logprobs
    assert first is None
    assert all(min(1, *(entry["rank"] or 1 for entry in each.values())) == 1 for each in rest)


def test_openai_package_reads_log_probabilities(split_cluster: Cluster) -> None:
    messages: Any = [{"role": "user", "content": "Say 😀."}]
    text = "The capital of France is"
    with openai.OpenAI(base_url=f"http://{split_cluster.http}/v1", api_key="none") as client:
        asked: Any = {"model": "", "max_tokens": 8, "temperature": 0.0}
        chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **asked)
        streamed = list(
            client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, stream=True, **asked)
        )
        completion = client.completions.create(prompt=text, logprobs=2, **asked)
        pieces = list(client.completions.create(prompt=text, logprobs=2, stream=True, **asked))
    (choice,) = chat.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert chat.usage is not None
    assert len(content) == chat.usage.completion_tokens
    written = b"".join(bytes(token.bytes or []) for token in content)
    assert written.decode(errors="replace").startswith(choice.message.content or "?")
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob), "greedy"
    parts = [part.choices[0].logprobs for part in streamed if part.choices]
    again = [token for part in parts if part for token in part.content or []]
    assert [(token.token, token.bytes) for token in again] == [(token.token, token.bytes) for token in content]
    # The second prompt comes from the cache, with other rounding.
    assert [token.logprob for token in again] == pytest.approx([token.logprob for token in content], abs=1e-3)
    scores = completion.choices[0].logprobs
    assert scores is not None
    assert "".join(scores.tokens or []).startswith(completion.choices[0].text)
    assert scores.text_offset == [len("".join((scores.tokens or [])[:i])) for i in range(len(scores.tokens or []))]
    assert [len(top) for top in scores.top_logprobs or []] == [2] * len(scores.tokens or [])
    offsets = [offset for piece in pieces if (of := piece.choices[0].logprobs) for offset in of.text_offset or []]
    assert offsets == scores.text_offset


class Cat(BaseModel):
    name: str = Field(max_length=12)
    lives: int = Field(ge=1, le=9)
    colours: list[Literal["black", "white", "red"]] = Field(min_length=1, max_length=2)


def test_openai_package_asks_for_structures(split_cluster: Cluster) -> None:
    messages: Any = [{"role": "user", "content": "Describe a cat as JSON."}]
    asked: Any = {"model": "", "messages": messages, "max_tokens": 90}
    with openai.OpenAI(base_url=f"http://{split_cluster.http}/v1", api_key="none") as client:
        chats = client.chat.completions
        for temperature, seed in ((0.0, 0), (1.0, 1)):
            parsed = chats.parse(response_format=Cat, temperature=temperature, seed=seed, **asked)
            (choice,) = parsed.choices
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Cat)
        streamed = chats.create(
            response_format={"type": "json_object"}, temperature=0, stream=True, **asked | {"max_tokens": 8}
        )
        text = "".join(part.choices[0].delta.content or "" for part in streamed if part.choices)
        assert text.lstrip().startswith("{")
        for structure, expected in (
            ({"choice": ["a tabby", "a siamese"]}, "a (tabby|siamese)"),
            ({"regex": "[A-Z][a-z]{2,5}, [0-9] years"}, "[A-Z][a-z]{2,5}, [0-9] years"),
            ({"grammar": 'start: "cat" ("!" | "?")'}, "cat[!?]"),
        ):
            completion = client.completions.create(
                model="", prompt="A cat:", extra_body={"structured_outputs": structure}, temperature=1, max_tokens=30
            )
            assert re.fullmatch(expected, completion.choices[0].text)
        unknown: Any = {"name": "x", "schema": {"type": "array", "uniqueItems": True}}
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            chats.create(response_format={"type": "json_schema", "json_schema": unknown}, **asked)


def test_every_option_is_kept_on_the_real_model(split_cluster: Cluster) -> None:
    prompt, options = "Once upon a time there was a", asks.OPTIONS

    def answer(option: dict[str, Any]) -> Answer:
        draw = {} if option.get("use_beam_search") else {"temperature": 0.8}
        sampling: dict[str, Any] = draw | {"seed": 5, "max_tokens": 12} | option
        return Answer(
            [
                wire.generate_response(chunk)
                for chunk in split_cluster.client.generate(GenerateRequest(prompt=Text(prompt), sampling=sampling))
            ]
        )

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, options))
    for option, found in zip(options, answers, strict=True):
        computes_more = option.get("use_beam_search") or option.get("best_of")
        assert found.usage.completion_tokens >= len(found.token_ids)
        assert computes_more or found.usage.completion_tokens == len(found.token_ids)
        assert set(found.token_ids) <= set(option.get("allowed_token_ids", found.token_ids))
        assert not set(found.token_ids) & {word[0] for word in option.get("bad_word_ids", ()) if len(word) == 1}
        assert len(found.token_ids) > option.get("min_tokens", 0)
        assert set(found.token_ids[:-1]).isdisjoint(option.get("stop_token_ids", ()))
    assert len({tuple(found.token_ids) for found in answers}) > len(answers) / 2


def test_openai_package_streams_a_chat(split_cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"http://{split_cluster.http}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        assert model == "smollm2-135m-instruct"
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert len(chunks) > 4
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8
        completion = client.completions.create(model=model, prompt="1, 2, 3,", max_tokens=4, temperature=0)
        assert completion.choices[0].text.startswith(" 4")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="gpt-4", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature must be between"):
            client.chat.completions.create(model=model, messages=messages, temperature=9)


def test_a_client_that_knows_only_reflection(split_cluster: Cluster) -> None:
    """`buf curl` learns the API from the server."""
    body = json.dumps({"text": "The capital of France is", "sampling": {"maxTokens": 3, "temperature": 0}})
    url = f"http://{split_cluster.grpc}/baton.v1.Inference/Generate"
    buf = Path(sys.executable).parent / "buf"
    out = subprocess.run(
        [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", body, url],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    messages = [json.loads(part) for part in out.stdout.replace("}\n{", "}\0{").split("\0")]
    assert "".join(message.get("text", "") for message in messages).startswith(" Paris")
    assert messages[-1]["finishReason"] == "length"


def test_the_command_line(split_cluster: Cluster) -> None:
    def baton(*args: str) -> str:
        command = [sys.executable, "-m", "deploy.cli", *args, "--address", split_cluster.grpc]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "Paris" in baton("generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0")
    answer = json.loads(baton("generate", "The capital of France is", "--max-tokens", "4", "--json"))
    assert answer["usage"]["completion_tokens"] == 4
    status = json.loads(baton("status", "--json"))
    whole = {"desired": 1, "ready": 1, "engine": []}
    assert status["pools"] == {"prefill": whole, "decode": whole}
    assert {worker["id"]: worker["role"] for worker in status["workers"]} == {
        "worker-0": "prefill",
        "worker-1": "decode",
    }
    assert all(worker["self_check"] == "ok" for worker in status["workers"])
    assert status["redis"]["ok"] is True
    assert status["routers"][0]["grpc"] == split_cluster.grpc
    assert "worker-1" in baton("status")
    report = json.loads(baton("doctor", "--json"))
    assert {check["name"]: check["state"] for check in report}["reachable"] == "ok"


@pytest.mark.chaos
def test_aggregated_answers_are_the_same(split_cluster: Cluster, prompts: list[list[int]]) -> None:
    """Tokens, text, usage and finish reason do not tell whether a request was split."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 10},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": 10},
        {"temperature": 0.7, "seed": 8, "max_tokens": 10, "stop": ["\n", " the"]},
    ]
    asked = [(prompts[4], each) for each in settings] + [(prompts[10], settings[1]), (prompts[-3], settings[2])]
    with running_cluster("--prefill", "0", "--decode", "1", router_mode="aggregated") as cluster:
        aggregated = [cluster.generate(token_ids=prompt, sampling=fields) for prompt, fields in asked]
    for (prompt, fields), whole in zip(asked, aggregated, strict=True):
        split = split_cluster.generate(token_ids=prompt, sampling=fields)
        assert (split.timing.mode, whole.timing.mode) == ("disaggregated", "aggregated")
        assert split.token_ids == whole.token_ids
        assert split.text == whole.text
        assert split.finish_reason == whole.finish_reason
        assert split.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.chaos
def test_a_pulled_prefix_gives_the_tokens_of_generate(split_cluster: Cluster, reference: Reference) -> None:
    """The prefill worker pulls what the decode worker generated, as in test_prefix_pull.py."""
    prompt = reference.tokenizer.encode("Once upon a time, in a village by the sea, there lived a fisherman who")
    with held_by(split_cluster) as num_tokens:
        first = split_cluster.generate(token_ids=prompt, sampling=sampling(100))
        so_far = prompt + first.token_ids
        num_tokens[first.timing.prefill_worker] = whole_blocks(len(prompt))
        num_tokens[first.timing.decode_worker] = whole_blocks(len(so_far) - 1)
    second_prompt = so_far + reference.tokenizer.encode(" The next morning, the fisherman")
    before = metric(split_cluster, "baton_kv_pulled_tokens_total")
    second = greedy(split_cluster, second_prompt)
    assert second.usage.cached_tokens == whole_blocks(len(so_far) - 1)
    assert second.timing.retries == 0
    num_pulled = whole_blocks(len(so_far) - 1) - whole_blocks(len(prompt))
    wait_until(lambda: metric(split_cluster, "baton_kv_pulled_tokens_total") == before + num_pulled)
    excepted = num_excepted(second.token_ids, *reference.generate(second_prompt, len(second.token_ids)))
    print(f"{num_pulled} tokens pulled, {excepted} answers excepted at a near tie")
