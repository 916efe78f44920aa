"""Endpoints of OpenAI's, Anthropic's and vLLM's APIs that are not served, each with the reason.

They are refused by name, so that nobody looks for a mistake of their own. Of a path that is served, other methods and
what lies below it are meant.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

_NO_FILES = "nothing is stored"
_NO_MEDIA = "the model reads and writes text"
_NO_SCORES = "the model writes text, and gives no vectors or scores of one"
_NO_AGENTS = "the cluster runs no tools or agents; a client calls its tools itself"
_NO_V1 = "the base URL of a client must end in /v1"
_OLLAMAS = "Baton has no Ollama API; use OpenAI's with a base URL that ends in /v1"
_NO_ACCOUNTS = "tenants and keys are in the operator's file"

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
    "/v1/batches": "requests are answered as they come",
    "/v1/chat/completions": "answers are not stored",
    "/v1/chatkit": _NO_AGENTS,
    "/v1/classify": _NO_SCORES,
    "/v1/containers": _NO_AGENTS,
    "/v1/content_provenance_checks": _NO_MEDIA,
    "/v1/conversations": "answers are not stored; a request brings its whole chat",
    "/v1/decisions": "the model is no classifier",
    "/v1/edits": "superseded by /v1/chat/completions",
    "/v1/embeddings": _NO_SCORES,
    "/v1/evals": _NO_FILES,
    "/v1/files": _NO_FILES,
    "/v1/fine_tuning": "the model is served as it is",
    "/v1/images": _NO_MEDIA,
    "/v1/live": _NO_MEDIA,
    "/v1/models": "the model is the operator's",
    "/v1/moderations": "the model is no classifier",
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
    "/v1/v1": "the base URL ends in /v1 already; leave out one of them",
    "/v1/vaults": _NO_AGENTS,
    "/v1/vector_stores": _NO_FILES,
    "/v1/videos": _NO_MEDIA,
    "/v1/webhook_endpoints": "the cluster calls nobody",
    "/v1/webhook_event_types": "the cluster calls nobody",
    "/v2/rerank": _NO_SCORES,
}
"""Path -> why neither it nor what lies below it is served. OpenAI's own, those that others have as well, and vLLM's."""
ANTHROPICS: Mapping[str, str] = {
    "/v1/complete": "superseded by /v1/messages",
    "/v1/compliance": _NO_ACCOUNTS,
    "/v1/deployment_runs": _NO_AGENTS,
    "/v1/deployments": _NO_AGENTS,
    "/v1/dreams": _NO_AGENTS,
    "/v1/environments": _NO_AGENTS,
    "/v1/memory_stores": _NO_FILES,
    "/v1/messages": "answers are not stored",
    "/v1/messages/batches": "requests are answered as they come",
    "/v1/organizations": _NO_ACCOUNTS,
    "/v1/sessions": _NO_AGENTS,
    "/v1/tunnels": "the cluster calls nobody",
    "/v1/user_profiles": _NO_ACCOUNTS,
}
"""Anthropic's own. See `OPENAIS`."""
_ALL = {**OPENAIS, **ANTHROPICS}
_DEEPEST = max(each.count("/") for each in _ALL)


def why_unserved(path: str) -> tuple[str, str] | None:
    """Returns the endpoint of which a path is a part, and why it is not served; None: it is not known."""
    found = _endpoint_of(path, _ALL)
    return None if found is None else (found, _ALL[found])


@functools.lru_cache(maxsize=256)  # asked with every answer
def is_anthropics(path: str) -> bool:
    """Returns whether a path is of Anthropic's API alone."""
    return _endpoint_of(path, ANTHROPICS) is not None


def _endpoint_of(path: str, endpoints: Collection[str]) -> str | None:
    """Returns the endpoint that a path is or lies below, the longest of several; None: there is none."""
    parts = path.split("/", _DEEPEST + 1)[: _DEEPEST + 1]
    for count in range(len(parts), 1, -1):
        if (above := "/".join(parts[:count])) in endpoints:
            return above
    return None
