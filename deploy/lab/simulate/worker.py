"""A worker in virtual time: the production engine, with its scheduler and block pool, over a model that only costs.

Steps in which every sequence decodes and nobody waits are taken many at once, as long as no sequence needs another
block: nothing can come between but an arrival, which cuts such a leap short at the end of the step that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
