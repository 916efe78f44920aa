"""An engine of our own in a process: `python -m tests.bench.threads_peer MODEL_DIR NUM_THREADS`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.bench.engine_sides import Baton
from tests.bench.peer import serve


def main() -> None:
    path, num_threads = sys.argv[1:]
    engine = Baton(Path(path), num_threads=int(num_threads))

    async def measure(prompts: list[list[int]], num_steps: int) -> dict[str, Any]:
        """Times are of a clock that all processes share."""
        found = engine.decode(prompts, num_steps) if num_steps else engine.prefill(prompts)
        return {"num_tokens": found.num_tokens, "began_s": found.began_s, "ended_s": found.began_s + found.wall_s}

    asyncio.run(serve({"measure": measure}))


if __name__ == "__main__":
    main()
