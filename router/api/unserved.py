"""Endpoints of OpenAI's, Anthropic's and vLLM's APIs that are not served, each with the reason.

They are refused by name, so that a client's developer does not look for a mistake of their own. If a path listed here
is itself served, its entry applies to other methods and to the paths below it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

_NO_FILES = "nothing is stored"
_NO_MEDIA = "the model reads and writes text"
_NO_SCORES = "the model generates text, and no embeddings or scores"
_NO_AGENTS = "the cluster runs no tools or agents; a client calls its tools itself"
_NO_V1 = "the base URL of a client must end in /v1"
_OLLAMAS = "Baton has no Ollama API; use OpenAI's with a base URL that ends in /v1"
_NO_ACCOUNTS = "the operator manages tenants and keys in a file"
_NO_CALLS = "the cluster makes no calls to other services"

OPENAIS: Mapping[str, str] = {
    "/api/chat": _OLLAMAS,
    "/api/generate": _OLLAMAS,
    "/api/show": _OLLAMAS,
    "/api/tags": _OLLAMAS,
    "/chat/completions": _NO_V1,
    "/classify": _NO_SCORES,
    "/completions": _NO_V1,
    "/messages": _NO_V1,
    "/models": _NO_V1,
    "/openai": "Baton has no Azure paths; use OpenAI's client with a base URL that ends in /v1",
    "/pooling": _NO_SCORES,
    "/rerank": _NO_SCORES,
    "/responses": _NO_V1,
    "/score": _NO_SCORES,
    "/v1/agents": _NO_AGENTS,
    "/v1/assistants": _NO_AGENTS,
    "/v1/audio": _NO_MEDIA,
    "/v1/batches": "there is no batch API; send the requests one by one",
    "/v1/chat/completions": "answers are not stored",
    "/v1/chatkit": _NO_AGENTS,
    "/v1/classify": _NO_SCORES,
    "/v1/containers": _NO_AGENTS,
    "/v1/content_provenance_checks": _NO_MEDIA,
    "/v1/conversations": "answers are not stored; send the whole chat with each request",
    "/v1/decisions": "the model is not a classifier",
    "/v1/edits": "superseded by /v1/chat/completions",
    "/v1/embeddings": _NO_SCORES,
    "/v1/evals": _NO_FILES,
    "/v1/files": _NO_FILES,
    "/v1/fine_tuning": "the cluster does not train models",
    "/v1/images": _NO_MEDIA,
    "/v1/live": _NO_MEDIA,
    "/v1/models": "the operator manages the model",
    "/v1/moderations": "the model is not a classifier",
    "/v1/organization": _NO_ACCOUNTS,
    "/v1/pooling": _NO_SCORES,
    "/v1/projects": _NO_ACCOUNTS,
    "/v1/realtime": _NO_MEDIA,
    "/v1/rerank": _NO_SCORES,
    "/v1/responses": "answers are not stored",
    "/v1/responses/compact": "conversations are not compacted",
    "/v1/safety": _NO_ACCOUNTS,
    "/v1/score": _NO_SCORES,
    "/v1/skills": _NO_AGENTS,
    "/v1/threads": _NO_AGENTS,
    "/v1/uploads": _NO_FILES,
    "/v1/v1": "the path has /v1 twice; remove one of them",
    "/v1/vaults": _NO_AGENTS,
    "/v1/vector_stores": _NO_FILES,
    "/v1/videos": _NO_MEDIA,
    "/v1/webhook_endpoints": _NO_CALLS,
    "/v1/webhook_event_types": _NO_CALLS,
    "/v2/rerank": _NO_SCORES,
}
"""Path -> why it and the paths below it are not served. These are OpenAI's own paths, shared ones, and vLLM's."""
ANTHROPICS: Mapping[str, str] = {
    "/v1/complete": "superseded by /v1/messages",
    "/v1/compliance": _NO_ACCOUNTS,
    "/v1/deployment_runs": _NO_AGENTS,
    "/v1/deployments": _NO_AGENTS,
    "/v1/dreams": _NO_AGENTS,
    "/v1/environments": _NO_AGENTS,
    "/v1/memory_stores": _NO_FILES,
    "/v1/messages": "answers are not stored",
    "/v1/messages/batches": "there is no batch API; send the requests one by one",
    "/v1/organizations": _NO_ACCOUNTS,
    "/v1/sessions": _NO_AGENTS,
    "/v1/tunnels": _NO_CALLS,
    "/v1/user_profiles": _NO_ACCOUNTS,
}
"""Paths of Anthropic's API alone. See `OPENAIS`."""
_ALL = {**OPENAIS, **ANTHROPICS}
_DEEPEST = max(each.count("/") for each in _ALL)


def why_unserved(path: str) -> tuple[str, str] | None:
    """Return the endpoint that a path is or lies below, and why it is not served; None: the path is unknown."""
    found = _endpoint_of(path, _ALL)
    return None if found is None else (found, _ALL[found])


@functools.lru_cache(maxsize=256)  # called with every response
def is_anthropics(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API alone."""
    return _endpoint_of(path, ANTHROPICS) is not None


def _endpoint_of(path: str, endpoints: Collection[str]) -> str | None:
    """Return the endpoint that a path is or lies below, the longest of several; None: there is none."""
    parts = path.split("/", _DEEPEST + 1)[: _DEEPEST + 1]
    for count in range(len(parts), 1, -1):
        if (above := "/".join(parts[:count])) in endpoints:
            return above
    return None
