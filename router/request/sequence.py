"""Makes the sequence that workers compute of a request: its sampling settled, its cache keyed by tenant."""

from __future__ import annotations

import hmac
from dataclasses import replace

from baton.blocks import cache_seed
from baton.messages import SequenceSpec
from baton.sampling import SamplingParams
from router.admission.tenants import Tenant


class SequenceBuilder:
    """Sequences of one model.

    Args:
        cache_secret: keys the tenants' cache scopes, and the seeds of requests without one.
    """

    def __init__(self, content_id: str, vocab_size: int, cache_secret: str) -> None:
        self._content_id = content_id
        self._vocab_size = vocab_size
        self._secret = cache_secret.encode()
        self._cache_seeds: dict[str, bytes] = {}  # by cache scope: as many as the operator has named

    def build(
        self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, tenant: Tenant
    ) -> SequenceSpec:
        """The sequence of a request's first choice."""
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        seed = self._seed(tenant, request_id) if params.seed is None else params.seed
        return SequenceSpec(
            request_id=request_id,
            choice_index=0,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            sampling=replace(params, top_k=top_k, seed=seed, stop=(), n=1),
            cache_seed=self._cache_seed(tenant),
        )

    def _cache_seed(self, tenant: Tenant) -> bytes:
        seed = self._cache_seeds.get(tenant.scope)
        if seed is None:
            seed = self._cache_seeds[tenant.scope] = cache_seed(self._content_id, self._secret, tenant.scope)
        return seed

    def _seed(self, tenant: Tenant, request_id: str) -> int:
        """The seed of a request that sets none: the same on every router and in every attempt, and not predictable."""
        name = f"seed\0{tenant.id}\0{request_id}"
        drawn = hmac.digest(self._secret, name.encode(), "sha256")[:8]
        return max(-(2**63 - 1), int.from_bytes(drawn, "little", signed=True))
