"""Compiles structures before a worker gets them, to reject those that are invalid, too expensive or unsupported."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from baton.sandbox import ReplyKind
from baton.structure import COMPILE_S, StructuredOutputs, invalid_structure, loosened, refused_structure, schemas_of
from router.prompt.sandboxes import Reply, Sandboxes

MAX_KNOWN = 256
"""Maximum number of cached verdicts per tenant."""
MAX_TENANTS = 64
"""Maximum number of tenants with cached verdicts."""


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
