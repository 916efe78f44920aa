"""Structures are compiled before a worker sees them: what is invalid, too costly or unknown ends here."""

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
"""Structures of a tenant of which the verdict is kept."""
MAX_TENANTS = 64
"""Tenants of which verdicts are kept."""


class StructureChecker:
    """Checks structures in processes of their own: there are some with which compiling has no end, and some that end
    the compiler. The event loop goes on meanwhile, and so do other tenants' structures.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: ids that the model has.
        eos_token_ids: tokens that end every answer.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        arguments = [str(tokenizer), str(vocab_size), *map(str, eos_token_ids)]
        self._compilers = Sandboxes("baton.grammar", arguments, name="structures to be compiled")
        self._verdicts = _Verdicts()

    async def check(self, structure: StructuredOutputs | None, tenant_id: str) -> StructuredOutputs | None:
        """Return the structure as workers can serve it; None: any text is an answer.

        What cannot be enforced of tools that are not strict is left out of it: the whole schemas of their arguments if
        they are too costly.

        Raises:
            InvalidRequest: it is not valid, has what is not known, or takes too long to compile.
            Overloaded: too many others of this tenant, or of all, wait to be compiled.
        """
        if structure is None:
            return None
        question = json.dumps(dataclasses.asdict(structure)).encode()
        digest = hashlib.blake2b(question, digest_size=16).digest()
        verdict = self._verdicts.of(tenant_id, digest)
        if verdict is None:
            async with self._compilers.turn(tenant_id, len(question)) as turn:
                verdict = self._verdicts.of(tenant_id, digest)  # it may have come several times at once
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
        """End the compilers' processes. Nothing is checked any more."""
        self._compilers.close()


class _Verdict(NamedTuple):
    """What is known of a structure."""

    problem: str = ""
    """What is wrong with it; empty: nothing."""
    left_out: str = ""
    """What is left out of it, as its compiler says it; empty: nothing."""
    is_too_much: bool = False
    """True if the compiler came to no answer."""


class _Verdicts:
    """What is known of structures, by tenant. What one tenant asks for takes nothing of what is known of another's, nor
    does it show that another has asked.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, OrderedDict[bytes, _Verdict]] = OrderedDict()

    def of(self, tenant_id: str, digest: bytes) -> _Verdict | None:
        """Return what is known of a structure; None: nothing."""
        own = self._known.get(tenant_id)
        if own is None or digest not in own:
            return None
        own.move_to_end(digest)
        self._known.move_to_end(tenant_id)
        return own[digest]

    def note(self, tenant_id: str, digest: bytes, verdict: _Verdict) -> None:
        """Keep a verdict, and as many others as there is room for."""
        own = self._known.setdefault(tenant_id, OrderedDict())
        own[digest] = verdict
        if len(own) > MAX_KNOWN:
            own.popitem(last=False)
        self._known.move_to_end(tenant_id)
        if len(self._known) > MAX_TENANTS:
            self._known.popitem(last=False)


def _verdict(reply: Reply) -> _Verdict:
    """Return what is known of a structure by what its compiler says, or what became of that."""
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
