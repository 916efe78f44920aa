"""Answers with a structure: whatever is drawn is one, and what may come next is a function of the tokens so far."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from baton.errors import InvalidRequest
from baton.grammar import GrammarCompiler
from baton.sampling import SamplingParams
from baton.scores import Sampled
from baton.structure import MAX_WHITESPACE, StructuredOutputs
from engine.core.runner import StepInput, StepOutput, StepPart
from engine.sampling.pipeline import Sampler
from engine.sampling.steps import Row
from engine.sampling.structure import Structures
from router.prompt import Tokenizer
from tests.unit.engine.sampling.structures import GRAMMARS, REGEXES, SCHEMAS, UNKNOWN

VOCAB_SIZE = 49152
EOS = 2
MAX_TOKENS = 160
SEEDS = (1, 2, 3)
ANY_JSON = [StructuredOutputs(json=json.dumps(schema)) for schema in SCHEMAS]
PROMPT = (504, 3575, 282)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def structures(model_dir: Path) -> Structures:
    return Structures(model_dir / "tokenizer.json", VOCAB_SIZE, {EOS})


@pytest.fixture(scope="module")
def sampler(structures: Structures) -> Sampler:
    return Sampler({EOS}, structures)


@pytest.fixture(scope="module")
def logits(tokenizer: Tokenizer) -> torch.Tensor:
    """What a model may think that ends its strings and numbers some day, and likes to indent."""
    found = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for text in ('"', "}", "]", ",", ":", "  ", "\n", '":', '",', '"}', "a", "1", "e"):
        (token_id,) = tokenizer.encode_fragment(text)
        found[token_id] += 7
    found[EOS] += 10
    return found


def answers(
    sampler: Sampler, logits: torch.Tensor, asked: Sequence[SamplingParams], first_key: int = 0
) -> list[list[int]]:
    """Draws answers together until all have ended, or are long enough."""
    drawn: list[list[int]] = [[] for _ in asked]
    going = list(range(len(asked)))
    for _ in range(MAX_TOKENS):
        rows = [row_of(asked[i], drawn[i], first_key + i if first_key >= 0 else -1) for i in going]
        for i, token_id in zip(going, sampler.sample(logits.repeat(len(going), 1), rows), strict=True):
            drawn[i].append(token_id)
        going = [i for i in going if drawn[i][-1] != EOS]
        if not going:
            break
    return drawn


def row_of(params: SamplingParams, answer: Sequence[int], key: int = -1) -> Row:
    return Row(params, 0, len(PROMPT) + len(answer), len(PROMPT), (*PROMPT, *answer), key)


def ended(drawn: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """The texts of the answers that have ended, with their numbers."""
    for number, answer in enumerate(drawn):
        if answer[-1] == EOS:
            yield number, b"".join(map(tokenizer.token_bytes, answer[:-1])).decode()


def drawing(structure: StructuredOutputs, seed: int, **asked: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "structured_outputs": structure, **asked})


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_drawn_obeys_its_schema(
    sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer, seed: int
) -> None:
    drawn = answers(sampler, logits, [drawing(each, seed) for each in ANY_JSON], first_key=1000 * seed)
    texts = dict(ended(drawn, tokenizer))
    for number, text in texts.items():
        value = json.loads(text)
        jsonschema.Draft202012Validator(
            SCHEMAS[number], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        ).validate(value)
    assert len(SCHEMAS) >= 50
    assert len(texts) > 0.8 * len(SCHEMAS), "too few have ended for a test that means something"


def test_white_space_between_tokens_of_json_is_bounded(
    sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer
) -> None:
    """Where nothing is as likely as a space, and in a schema that asks for more."""
    likes_spaces = logits.clone()
    (space,) = tokenizer.encode_fragment(" ")
    likes_spaces[space] += 100
    schema = SCHEMAS[36] | {"x-guidance": {"whitespace_flexible": True}}
    drawn = answers(sampler, likes_spaces, [drawing(StructuredOutputs(json=json.dumps(schema)), 1)], 20_000)
    text = tokenizer.decode(drawn[0])
    runs = [len(run) for run in re.findall(r" +", text)]
    assert max(runs) == MAX_WHITESPACE


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_drawn_obeys_its_expression(
    sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer, seed: int
) -> None:
    asked = [drawing(StructuredOutputs(regex=regex), seed) for regex in REGEXES]
    texts = dict(ended(answers(sampler, logits, asked, 30_000 + 100 * seed), tokenizer))
    assert len(texts) == len(REGEXES)
    for number, text in texts.items():
        assert re.fullmatch(REGEXES[number], text), (REGEXES[number], text)


def test_grammars_and_choices(sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer) -> None:
    expected = [r"(a*)cb*|a*cb*", r"[-+()0-9]+", r"yes|no ?", r"[a-c][0-9](, [a-c][0-9])*"]
    grammars = [drawing(StructuredOutputs(grammar=grammar), 3) for grammar in GRAMMARS]
    texts = dict(ended(answers(sampler, logits, grammars, 40_000), tokenizer))
    assert len(texts) >= 3
    for number, text in texts.items():
        assert re.fullmatch(expected[number], text), (GRAMMARS[number], text)
    choices = ("yes", "no", "größer als", '"quoted"\n', "😀")
    asked = [drawing(StructuredOutputs(choice=choices), seed) for seed in range(30)]
    found = {text for _, text in ended(answers(sampler, torch.zeros(VOCAB_SIZE), asked, 41_000), tokenizer)}
    assert found == set(choices)
    objects = [drawing(StructuredOutputs(json_object=True), seed) for seed in range(20)]
    texts = dict(ended(answers(sampler, logits, objects, 42_000), tokenizer))
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts.values())


def test_an_answer_goes_on_anywhere(model_dir: Path, sampler: Sampler, logits: torch.Tensor) -> None:
    """Kept from step to step, replayed at each of them, and replayed by another worker from the middle on."""
    asked = [drawing(each, 5, temperature=0.8) for each in ANY_JSON[-8:]]
    kept, replayed = answers(sampler, logits, asked, 50_000), answers(sampler, logits, asked, -1)
    assert kept == replayed
    another = Sampler({EOS}, Structures(model_dir / "tokenizer.json", VOCAB_SIZE, {EOS}))
    for key, (params, answer) in enumerate(zip(asked, kept, strict=True)):
        half = len(answer) // 2
        assert another.sample(logits[None].clone(), [row_of(params, answer[:half], key)]) == [answer[half]]


def test_a_row_does_not_depend_on_the_others(sampler: Sampler, logits: torch.Tensor) -> None:
    asked = [drawing(each, 9) for each in ANY_JSON[::9]]
    together = answers(sampler, logits, asked, 60_000)
    alone = [answers(sampler, logits, [each], 61_000 + number)[0] for number, each in enumerate(asked)]
    assert together == alone
    plain = Row(SamplingParams(temperature=0.0), 0, 3)
    rows = [row_of(asked[0], ()), plain]
    assert sampler.sample(logits.repeat(2, 1), rows)[1] == int(logits.argmax())


def test_a_structure_is_stronger_than_what_excludes_all_of_it(
    sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer
) -> None:
    """Bad words, allowed tokens and a minimum length give way."""
    structure = StructuredOutputs(choice=("a",))
    letter = tokenizer.encode_fragment("a")[0]
    for asked in ({"bad_word_ids": ((letter,),)}, {"allowed_token_ids": (5, 6)}, {"min_tokens": 5}):
        for temperature in (0.0, 1.0):
            params = drawing(structure, 1, temperature=temperature, **asked)
            assert answers(sampler, logits, [params], -1) == [[letter, EOS]]


def test_what_begins_beside_the_forward_pass_is_what_is_drawn_with(sampler: Sampler, logits: torch.Tensor) -> None:
    rows = [row_of(drawing(structure, 4), ()) for structure in ANY_JSON[:4]]
    plain = sampler.sample(logits.repeat(4, 1), rows)
    sampler.begin(rows)
    assert sampler.sample(logits.repeat(4, 1), rows) == plain
    later = [row_of(drawing(ANY_JSON[5], 4), ())]
    assert sampler.sample(logits[None].clone(), later) == [
        answers(sampler, logits, [drawing(ANY_JSON[5], 4)], -1)[0][0]
    ]


def test_a_grammar_sleeps_while_the_answer_reasons(
    sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer
) -> None:
    """Tokens of any kind but an end, then those that end the reasoning, of which the last ones may be some already."""
    end = tuple(tokenizer.encode_fragment("</think>"))
    assert len(end) > 1
    params = drawing(StructuredOutputs(choice=("yes",)), 1, reasoning_end_ids=end)
    free = SamplingParams(temperature=1.0, seed=1, bad_word_ids=((EOS,),))
    for reasoning in ((), (11, 12), (11, *end[:-1]), (*end[:-1], *end[:-1])):
        drawn = sampler.sample(logits[None].clone(), [row_of(params, reasoning)])
        assert drawn == sampler.sample(logits[None].clone(), [row_of(free, reasoning)]), "nothing else is masked"
    for reasoning in (end, (11, 12, *end), (*end[:1], *end)):
        (token_id,) = sampler.sample(logits[None].clone(), [row_of(params, reasoning)])
        assert "yes".startswith(tokenizer.decode([token_id]))
        rest = sampler.sample(logits[None].clone(), [row_of(params, [*reasoning, token_id])])
        assert "yes<|im_end|>".startswith(tokenizer.decode_all([token_id, *rest]))


def test_a_budget_ends_the_reasoning(sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer) -> None:
    end = tuple(tokenizer.encode_fragment("</think>"))
    structure = StructuredOutputs(choice=("yes",))
    for budget in (0, 1, 7):
        params = drawing(structure, 1, reasoning_end_ids=end, thinking_budget=budget)
        (answer,) = answers(sampler, logits, [params], 70_000 + budget)
        assert tuple(answer[budget : budget + len(end)]) == end
        assert tokenizer.decode(answer[budget + len(end) :]) == "yes"
    params = drawing(structure, 1, reasoning_end_ids=end, thinking_budget=4)
    begun = [9, 9, 9, *end[:1]]
    assert sampler.sample(logits[None].clone(), [row_of(params, begun)]) == [end[1]], "what is there is not begun again"
    alone = SamplingParams(temperature=1.0, seed=1, reasoning_end_ids=end, thinking_budget=3)
    drawn: list[int] = []
    while len(drawn) < 12:
        drawn += sampler.sample(logits[None].clone(), [row_of(alone, drawn)])
    assert tuple(drawn[3 : 3 + len(end)]) == end, "without a structure, too"


def test_an_answer_reasons_if_its_first_token_says_so(
    sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer
) -> None:
    """Else it has its structure from there on; a budget counts what is behind that token."""
    begin, end, words = 7, (11, 12), StructuredOutputs(choice=("yes",))
    params = drawing(words, 1, reasoning_begin_id=begin, reasoning_end_ids=end, thinking_budget=2)
    likely = logits.clone()
    likely[begin] = logits.max() + 50

    def answer(of_logits: torch.Tensor, num_tokens: int) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < num_tokens:
            drawn += sampler.sample(of_logits[None].clone(), [row_of(params, drawn)])
        return drawn

    first, *rest = answer(likely, 6)
    assert first == begin
    assert tuple(rest[2:4]) == end, "not before, as the token that begins it is likeliest"
    assert "yes".startswith(tokenizer.decode(rest[4:5]))
    likely[begin] = logits.min() - 50
    assert "yes<|im_end|>".startswith(tokenizer.decode_all(answer(likely, 2)))
    likely[begin], likely[9] = logits.min(), logits.max() + 50
    assert answer(likely, 1) != [9], "no other token begins one"
    alone = replace(params, structured_outputs=None)
    drawn = sampler.sample(likely[None].clone(), [row_of(alone, [9, 9, 9, 9])])
    assert drawn == [9], "an answer without a reasoning needs no end of one"


@pytest.mark.parametrize(("schema", "word"), UNKNOWN)
def test_what_is_not_known_is_refused_by_its_name(structures: Structures, schema: Any, word: str) -> None:
    structure = StructuredOutputs(json=json.dumps(schema))
    with pytest.raises(InvalidRequest, match=r"^sampling\.structured_outputs cannot be served") as refusal:
        structures.prepare(SamplingParams(structured_outputs=structure))
    assert word in str(refusal.value)
    assert refusal.value.param == "structured_outputs"


def test_a_model_without_texts_or_an_end_has_no_structured_answers(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    folder = model_dir / "tokenizer.json"
    for structures, sentence in (
        (Structures(None, 8, {0}), "the worker's model has no tokenizer"),
        (Structures(folder, VOCAB_SIZE, ()), "the model has no token that ends an answer"),
        (Structures(folder, 8, {0}), "vocab size too small"),
        (Structures(model_dir / "nowhere.json", VOCAB_SIZE, {0}), "cannot be served"),
    ):
        structures.load()
        with pytest.raises(InvalidRequest, match=sentence):
            structures.prepare(asked)
    assert caplog.text.count("structured outputs are not available") == 2, "whether there is an end is looked at later"


def test_what_becomes_too_complex_fails_alone(sampler: Sampler, logits: torch.Tensor, tokenizer: Tokenizer) -> None:
    """The library notices only in the middle of an answer."""
    schema = {"type": "string", "pattern": "^(a|b|ab)*c{1,1000}(.{0,1000}){0,1000}x$"}
    asked = drawing(StructuredOutputs(json=json.dumps(schema)), 1)
    so_far = [*tokenizer.encode_fragment('"'), *tokenizer.encode_fragment("c"), *tokenizer.encode_fragment("c")]
    plain = Row(SamplingParams(temperature=0.0), 0, 3)
    found = sampler.sample_and_score(logits.repeat(2, 1), [plain, row_of(asked, so_far)])
    assert found.token_ids[0] == int(logits.argmax())
    assert list(found.failures) == [1]
    assert "too many expressions" in found.failures[1]


def test_a_token_is_refused_before_its_grammar_holds_up_a_step(model_dir: Path, tokenizer: Tokenizer) -> None:
    """The library would go on for three such tokens, the last of which takes it a tenth of a second."""
    compiler = GrammarCompiler(model_dir / "tokenizer.json", tokenizer.vocab_size, tokenizer.eos_ids)
    matcher = compiler.compile(StructuredOutputs(grammar='start: ("a"? )~1..100000'))
    (token_id,) = tokenizer.encode("aaaaaaaa")[:1]
    with pytest.raises(InvalidRequest, match="max is 1000"):
        matcher.copy().take([token_id])


def test_a_failure_is_that_of_its_part() -> None:
    parts = tuple(
        StepPart(
            sequence_key=key,
            token_ids=(1,),
            num_computed_tokens=0,
            block_ids=((0,),),
            num_kv_tokens=(1,),
            sample=key != 0,
            is_decoding=False,
            sampling=SamplingParams(),
            choice_index=0,
            num_prompt_tokens=1,
        )
        for key in range(3)
    )
    assert StepOutput.one_each(StepInput(parts), Sampled([7, 8], failures={1: "why"})).failures == {2: "why"}
    assert StepOutput.one_each(StepInput(parts), Sampled([7, 8])).failures is None
