"""Turns a prompt into the sequence that workers compute.

1. `PromptEncoder` runs the chat template in a sandbox and the tokenizer, and checks the token ids.
2. `in_tokens` converts texts in sampling parameters to token ids, because workers handle only token ids.
3. `SequenceBuilder` completes the sampling parameters, and keys the cache by tenant.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import hmac
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from baton.api import Chat, PromptInput, Text, TokenIds, Truncation, TruncationSide
from baton.blocks import cache_seed
from baton.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from baton.messages import ROUTERS_SAMPLING, PlacedImage, SeenImage, SequenceSpec
from baton.sampling import DRY_BREAKERS, MAX_BAD_WORD_TOKENS, SamplingParams
from baton.sandbox import ReplyKind
from baton.structure import COMPILE_S, StructuredOutputs, invalid_structure, loosened, refused_structure, schemas_of
from baton.tasks import seen_through
from baton.template import RENDER_S, refused
from baton.turns import Turns
from router.admission import MAX_SETTLED, ModelFacts, check_length, check_prompt, check_vocabulary
from router.admission.tenants import Tenant
from router.prompt.chat import until_continued, with_systems_first
from router.prompt.sandboxes import Reply, Sandboxes
from router.prompt.tokenizer import ChatDraft, Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
Encode: TypeAlias = Callable[[str], list[int]]
MAX_INLINE_BYTES = 4096
"""Longest prompt that is tokenized on the event loop, in a millisecond or two; longer ones go to a thread."""
CUT_TIMES = 2
"""A prompt to truncate may have this many times the longest text that fits. It is cut to this many times the longest
text of the kept tokens before it is tokenized."""
ORDINARY_CHARACTERS = 16
"""Upper estimate of the mean number of characters per token."""
MESSAGE_BYTES = 64
"""Cost of a message in addition to its text, in bytes of text."""
MAX_THREADS = 4
"""Maximum number of threads that tokenize, on a machine with as many processors. They seldom block the event loop,
because tokenizers release the GIL."""
MAX_WAITING_BYTES = 64 * 2**20
_NO_ROUTERS_SAMPLING: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.name in ROUTERS_SAMPLING}
MAX_KNOWN = 256
"""Maximum number of cached verdicts per tenant."""
MAX_TENANTS = 64
"""Maximum number of tenants with cached verdicts."""


class PromptEncoder:
    """Encodes prompts of one model.

    Short prompts are encoded at once, long ones in a few threads that serve tenants in round-robin order. The model's
    template renders chats in a sandbox process, because it may take a second and a lot of memory.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        num_threads = max(2, min(MAX_THREADS, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(num_threads, "prompts")
        self._turns = Turns(num_threads, MAX_WAITING_BYTES)
        self._has_merged = False
        """True if the warning about merged system messages is logged."""
        self._templates = Sandboxes("baton.template", setup=tokenizer.chat_template.setup, name="chats to be written")

    async def start(self) -> None:
        """Start a process that renders chats, if the model has a template.

        Raises:
            ModelLoadError: the template is invalid, or takes too long to compile.
        """
        if not self._tokenizer.chat_template.source:
            return
        reply = await self._templates.start()
        if reply.kind is not ReplyKind.ANSWERED:
            raise ModelLoadError(reply.text.decode() or "the model's chat template takes too much to load")

    def close(self) -> None:
        """Stop the threads and the processes. No prompt can be encoded afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._templates.close()

    async def encode(
        self, prompt: PromptInput, tenant: Tenant, facts: ModelFacts, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        """Return the prompt's token ids. Segments that were encoded for the tenant's cache scope are reused.

        Args:
            truncation: number and side of the tokens to keep of a longer prompt.

        Raises:
            InvalidRequest: the prompt is empty, too long, not renderable, or has ids outside the vocabulary.
            Overloaded: too many long prompts wait.
        """
        longest, num_characters = self._tokenizer.longest_token, _num_characters(prompt)
        check_length(num_characters // (1 if truncation is None else CUT_TIMES), longest, facts)
        if truncation is not None and isinstance(prompt, Text):
            most = CUT_TIMES * truncation.num_tokens * longest
            prompt = replace(prompt, text=_cut(prompt.text, truncation.side, most))
        match prompt:
            case Text(text, parse_special, add_special_tokens):
                encode = functools.partial(
                    self._tokenizer.encode, parse_special=parse_special, add_special_tokens=add_special_tokens
                )
                token_ids = await self._encode(tenant, text, encode, facts, truncation)
            case Chat():
                text, mark = await self._written(prompt, tenant, num_characters + _overhead(prompt))
                encode = functools.partial(self._tokenizer.encode_written, mark=mark, scope=tenant.scope)
                token_ids = await self._encode(tenant, text, encode, facts, truncation)
            case TokenIds():
                token_ids = prompt.ids
        if truncation is not None:
            token_ids = truncation.of(token_ids)
        check_prompt(token_ids, facts)
        if not isinstance(prompt, Chat):  # a chat's ids are in the vocabulary; a post-processor may add any to a text
            check_vocabulary(token_ids, facts)
        return token_ids

    async def _encode(
        self, tenant: Tenant, text: str, encode: Encode, facts: ModelFacts, truncation: Truncation | None
    ) -> tuple[int, ...]:
        work = functools.partial(_encoded, encode, text, facts, truncation)
        return tuple(await self._run(tenant, _cost(text), work))

    async def _written(self, chat: Chat, tenant: Tenant, cost: int) -> tuple[str, str | None]:
        """Return the rendered chat, and its mark (`ChatDraft`)."""
        draft, reply = await self._answered(chat, tenant, cost)
        if reply.kind is ReplyKind.REFUSED and (merged := with_systems_first(chat)) is not None:
            draft, reply = await self._answered(merged, tenant, cost)
            self._say_merged(reply)
        text = _text_of(reply)
        return until_continued(text) if chat.continue_final_message else text, draft.mark

    async def _answered(self, chat: Chat, tenant: Tenant, cost: int) -> tuple[ChatDraft, Reply]:
        draft = await self._run(tenant, cost, functools.partial(self._tokenizer.draft_chat, chat))
        async with self._templates.turn(tenant.id, len(draft.question)) as turn:
            return draft, await turn.ask(draft.question)

    def _say_merged(self, reply: Reply) -> None:
        if reply.kind is ReplyKind.ANSWERED and not self._has_merged:
            self._has_merged = True
            logger.warning(
                "the model's chat template accepts a system message only at the start: the router appends later ones "
                "to the first system message"
            )

    async def _run(self, tenant: Tenant, num_bytes: int, work: Callable[[], T]) -> T:
        """Run work that costs as much as encoding `num_bytes` of text: at once if it is short, else in a thread."""
        if num_bytes <= MAX_INLINE_BYTES:
            return work()
        async with self._turns.turn(tenant.id, num_bytes):
            working = self._threads.submit(work)
            await seen_through(working_here := asyncio.wrap_future(working))
        return working_here.result()


def _encoded(encode: Encode, text: str, facts: ModelFacts, truncation: Truncation | None) -> list[int]:
    """Return the tokens of a text.

    If the text is far too long, only a part of it is encoded, because a tokenizer needs over 100 bytes of memory per
    token. Without truncation, the part proves that the prompt is too long. With truncation, it holds all kept tokens.

    Raises:
        ContextLengthExceeded: the part alone is too long.
    """
    most = facts.max_model_len if truncation is None else truncation.num_tokens
    part = _cut(text, TruncationSide.RIGHT if truncation is None else truncation.side, ORDINARY_CHARACTERS * most)
    if len(part) < len(text):
        token_ids = encode(part)
        if len(token_ids) >= CUT_TIMES * most:
            if truncation is None:
                raise ContextLengthExceeded(
                    f"the first {len(part)} of the prompt's {len(text)} characters have {len(token_ids)} tokens, but "
                    f"{facts.id} takes at most {most - 1}; shorten the prompt",
                    "input",
                )
            return token_ids
    return encode(text)


def _text_of(reply: Reply) -> str:
    """Return the rendered chat.

    Raises:
        InvalidRequest: the template refused the chat, or exceeded a limit.
    """
    match reply.kind:
        case ReplyKind.ANSWERED:
            return reply.text.decode(errors="surrogatepass")
        case ReplyKind.REFUSED:
            raise InvalidRequest(reply.text.decode(), "messages")
        case ReplyKind.TOO_DEEP:
            raise refused("it is nested too deeply")
        case ReplyKind.TOO_LONG:
            raise refused(f"it takes more than {RENDER_S:g} s")
        case ReplyKind.EXHAUSTED:
            raise refused("it takes too much memory")
    raise refused("it ends the process that renders it")


def _num_characters(prompt: PromptInput) -> int:
    match prompt:
        case Text(text):
            return len(text)
        case Chat(messages=messages, tools=tools):
            texts = sum(message.num_characters for message in messages)
            return texts + sum(tool.num_characters for tool in tools)
    return 0


def _overhead(prompt: PromptInput) -> int:
    """Return the cost of a prompt in addition to its texts, in bytes of text."""
    if not isinstance(prompt, Chat):
        return 0
    of_any_size = bool(prompt.documents or prompt.template_kwargs)
    return MESSAGE_BYTES * len(prompt.messages) + MAX_INLINE_BYTES * of_any_size


def _cost(text: str) -> int:
    """Return the cost of encoding a text, in bytes of UTF-8; for a long text a lower bound."""
    return len(text) if len(text) > MAX_INLINE_BYTES or text.isascii() else len(text.encode(errors="replace"))


def _cut(text: str, side: TruncationSide, most: int) -> str:
    """Return at most `most` characters from the end or start of a text, to keep its last or first tokens.

    The limit is generous, so the cut is far away from the kept tokens.
    """
    if len(text) <= most:
        return text
    return text[-most:] if side is TruncationSide.LEFT else text[:most]


class SequenceBuilder:
    """Builds sequences of one model.

    Args:
        cache_secret: keys the tenants' cache scopes, and the derived seeds of requests.
    """

    def __init__(self, content_id: str, vocab_size: int, cache_secret: str) -> None:
        self._content_id = content_id
        self._vocab_size = vocab_size
        self._secret = cache_secret.encode()
        self._cache_seeds: dict[str, bytes] = {}  # by cache scope; the tenants' file bounds their number

    def build(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        tenant: Tenant,
    ) -> SequenceSpec:
        """Return the sequence of a request's first choice.

        Args:
            params: with token ids in place of texts (`in_tokens`).
        """
        sampling = _for_workers(params, self._vocab_size)
        if sampling.seed is None:
            sampling = sampling.seeded(self._seed(tenant, request_id))
        return SequenceSpec(
            request_id=request_id,
            choice_index=0,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=sampling,
            cache_seed=self.cache_seed(tenant),
        )

    def cache_seed(self, tenant: Tenant) -> bytes:
        """Return the cache seed of a tenant's sequences."""
        seed = self._cache_seeds.get(tenant.scope)
        if seed is None:
            seed = self._cache_seeds[tenant.scope] = cache_seed(self._content_id, self._secret, tenant.scope)
        return seed

    def _seed(self, tenant: Tenant, request_id: str) -> int:
        """Return the seed of a request without one: equal on all routers and in all attempts, and unpredictable."""
        name = f"seed\0{tenant.id}\0{request_id}"
        drawn = hmac.digest(self._secret, name.encode(), "sha256")[:8]
        return max(-(2**63 - 1), int.from_bytes(drawn, "little", signed=True))


@functools.lru_cache(maxsize=MAX_SETTLED)
def _for_workers(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the sampling parameters for workers; the seed is still missing if tokens are drawn and none is set."""
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    logprobs = 0 if params.is_selected and params.logprobs is None else params.logprobs
    if params.use_beam_search:
        params = replace(params, beam_width=params.num_beams)
    seed = 0 if params.seed is None and not (params.temperature or params.xtc_probability) else params.seed
    return replace(params, **_NO_ROUTERS_SAMPLING, top_k=top_k, logprobs=logprobs, seed=seed)


def in_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return the parameters with token ids in place of texts. Stop strings stay, because the router matches them.

    Raises:
        InvalidRequest: a text is not valid Unicode, or a bad word has too many tokens.
    """
    if params.bad_words:
        words = [ids for word in params.bad_words for ids in _spellings(word, tokenizer)]
        params = replace(params, bad_words=(), bad_word_ids=tuple(dict.fromkeys((*params.bad_word_ids, *words))))
    if params.dry_multiplier:
        # The last token of a breaker after other text, as in text-generation-webui.
        last = [tokenizer.encode_fragment(f"a{breaker}")[-1] for breaker in params.dry_sequence_breakers]
        breakers = tuple(dict.fromkeys((*params.dry_breaker_ids, *last)))
        params = replace(params, dry_sequence_breakers=DRY_BREAKERS, dry_breaker_ids=breakers)
    if params.xtc_probability and not params.xtc_exempt_token_ids:
        params = replace(params, xtc_exempt_token_ids=tuple(tokenizer.encode_fragment("\n")[-1:]))
    return params


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of a word at the start of a text and after a space; white space is encoded unchanged."""
    texts = [prefix + word.lstrip() for prefix in ("", " ")] if word.strip() else [word]
    spellings = [tuple(tokenizer.encode_fragment(text)) for text in texts]
    if any(len(ids) > MAX_BAD_WORD_TOKENS for ids in spellings):
        raise InvalidRequest(
            f"sampling.bad_words must be texts of at most {MAX_BAD_WORD_TOKENS} tokens; shorten the one that starts "
            f"with {word[:20]!a}",
            "bad_words",
        )
    return spellings


class StructureChecker:
    """Checks structures in sandbox processes, because some structures make the compiler hang or crash.

    The event loop and the structures of other tenants are not blocked.

    Args:
        tokenizer: path of the model's tokenizer.json.
        vocab_size: number of ids that the model has.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        arguments = [str(tokenizer), str(vocab_size), *map(str, eos_token_ids)]
        self._compilers = Sandboxes("baton.grammar", arguments, name="structures to be compiled")
        self._verdicts = _Verdicts()

    async def check(self, structure: StructuredOutputs | None, tenant_id: str) -> StructuredOutputs | None:
        """Return the structure as workers can serve it; None: the answer is not constrained.

        Parts of the schemas of tools that are not strict are dropped if they cannot be enforced, and whole schemas if
        they are too expensive.

        Raises:
            InvalidRequest: the structure is invalid, uses an unsupported feature, or takes too long to compile.
            Overloaded: too many structures of this tenant, or of all tenants, wait for the compiler.
        """
        if structure is None:
            return None
        question = json.dumps(dataclasses.asdict(structure)).encode()
        digest = hashlib.blake2b(question, digest_size=16).digest()
        verdict = self._verdicts.of(tenant_id, digest)
        if verdict is None:
            async with self._compilers.turn(tenant_id, len(question)) as turn:
                verdict = self._verdicts.of(tenant_id, digest)  # a concurrent request may have compiled it meanwhile
                if verdict is None:
                    verdict = _verdict(await turn.ask(question))
                    self._verdicts.note(tenant_id, digest, verdict)
        if verdict.is_too_much:
            placed = schemas_of(structure)
            lighter = loosened(structure, [(index, ()) for index, each in enumerate(placed) if each.is_loose])
            if lighter != structure:
                return await self.check(lighter, tenant_id)
            if len(placed) == 1 and placed[0].place.startswith("tools["):
                raise refused_structure(f"{placed[0].place}: this schema cannot be enforced ({verdict.problem})")
            raise invalid_structure(verdict.problem)
        if verdict.problem:
            raise refused_structure(verdict.problem)
        left_out = [(index, tuple(path)) for index, path in json.loads(verdict.left_out or "[]")]
        return loosened(structure, left_out)

    def close(self) -> None:
        """Kill the compilers' processes. No structure can be checked afterwards."""
        self._compilers.close()


class _Verdict(NamedTuple):
    """Result of compiling a structure."""

    problem: str = ""
    """Description of the error; empty: none."""
    left_out: str = ""
    """Dropped parts, as the compiler reports them; empty: none."""
    is_too_much: bool = False
    """True if the compiler hit a limit or died."""


class _Verdicts:
    """Cache of verdicts, separate for each tenant.

    So one tenant can neither evict another one's verdicts nor learn from timing what another one has asked.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, OrderedDict[bytes, _Verdict]] = OrderedDict()

    def of(self, tenant_id: str, digest: bytes) -> _Verdict | None:
        """Return the cached verdict of a structure, or None."""
        own = self._known.get(tenant_id)
        if own is None or digest not in own:
            return None
        own.move_to_end(digest)
        self._known.move_to_end(tenant_id)
        return own[digest]

    def note(self, tenant_id: str, digest: bytes, verdict: _Verdict) -> None:
        """Cache a verdict, and evict the least recently used ones beyond the limits."""
        own = self._known.setdefault(tenant_id, OrderedDict())
        own[digest] = verdict
        if len(own) > MAX_KNOWN:
            own.popitem(last=False)
        self._known.move_to_end(tenant_id)
        if len(self._known) > MAX_TENANTS:
            self._known.popitem(last=False)


def _verdict(reply: Reply) -> _Verdict:
    """Return the verdict that follows from a compiler's reply."""
    match reply.kind:
        case ReplyKind.ANSWERED:
            return _Verdict(left_out=reply.text.decode())
        case ReplyKind.REFUSED:
            return _Verdict(reply.text.decode(errors="replace"))
        case ReplyKind.TOO_LONG:
            told = f"it takes more than {COMPILE_S:g} s to compile"
        case ReplyKind.TOO_DEEP:
            told = "it is nested too deeply"
        case ReplyKind.EXHAUSTED:
            told = "it takes too much memory to compile"
        case _:
            told = "it ends the compiler"
    return _Verdict(told, is_too_much=True)


def with_images(
    prompt_ids: Sequence[int], placeholder: int, seen: Sequence[SeenImage]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Return a prompt with each image's tokens in place of its placeholder, and the places of the images.

    Args:
        prompt_ids: tokens of the rendered chat, with one placeholder per image, in the images' order.
        placeholder: the token that stands for an image.

    Raises:
        InvalidRequest: the prompt does not have one placeholder per image. A client cannot add any: see
            `router.prompt.literal`.
    """
    num_places = prompt_ids.count(placeholder)
    if num_places != len(seen):
        raise InvalidRequest(
            f"the model's chat template writes {num_places} places for {len(seen)} images; send images in a "
            "user's message only, and no special tokens of the model",
            "messages",
        )
    token_ids: list[int] = []
    placed: list[PlacedImage] = []
    begin = 0
    for image in seen:
        end = prompt_ids.index(placeholder, begin)
        token_ids += prompt_ids[begin:end]
        placed.append(image.placed(len(token_ids)))
        token_ids += image.token_ids
        begin = end + 1
    token_ids += prompt_ids[begin:]
    return tuple(token_ids), tuple(placed)
