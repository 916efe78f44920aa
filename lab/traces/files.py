"""Readers of public request traces.

    Mooncake  .jsonl  {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}, one id per block
    Azure     .csv    timestamp_ms,input_length,output_length or TIMESTAMP,ContextTokens,GeneratedTokens; no prefixes

Each may be compressed: `.jsonl.gz`, `.csv.gz`. Mooncake's are in https://github.com/kvcache-ai/Mooncake, under
FAST25-release/traces, and Azure's in https://github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count, groupby, islice, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from baton.errors import ConfigError
from lab.traces.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from io import BufferedIOBase

BLOCK_TOKENS = 512
"""Tokens per block of Mooncake's ids. Azure's traces get blocks of the same size."""

GZIP_MAGIC = b"\x1f\x8b"
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Record:
    """Content of one line of a file."""

    time_us: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] | None
    """Ids of the prompt's blocks; None: the file contains no prefixes."""


def read_trace(path: Path, *, spread_seed: int | None = 0) -> Trace:
    """Return the requests of a file in order of time; the earliest timestamp becomes 0 s.

    The name determines the format (`.jsonl` or `.csv`), the header determines which of the two CSV formats it is, and
    the first bytes show whether the file is compressed. Blank lines are skipped. An output of 0 tokens becomes one of 1
    token.

    Mooncake: arrivals were recorded on ticks of about 3 s. They are spread by `spread_ticks` with `spread_seed`, or
    stay on their ticks if it is None. Only full blocks keep their ids.
    Azure: arrivals are exact and never spread. No prompts share blocks.

    Raises ConfigError, with file and line, if the file cannot be read or is not such a trace.
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in (".jsonl", ".csv"):
        raise ConfigError(f"{path}: a trace's name ends in .jsonl, .jsonl.gz, .csv or .csv.gz")
    try:
        with _open(path) as file:
            records = _records(path, suffix, file)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not records:
        raise ConfigError(f"{path} holds no requests")
    trace = _trace(path.name.removesuffix(".gz").removesuffix(suffix), records)
    return spread_ticks(trace, spread_seed) if suffix == ".jsonl" and spread_seed is not None else trace


def spread_ticks(trace: Trace, seed: int) -> Trace:
    """Return the trace with requests of the same timestamp spread randomly until the next one, in the same order.

    A tick, including the last one, is no longer than the median distance between neighbouring timestamps.
    """
    ticks = sorted({request.arrival_s for request in trace.requests})
    distances = [later - earlier for earlier, later in pairwise(ticks)]
    if not distances:
        return trace
    usual_s = median_low(distances)
    rng = random.Random(seed)
    spread: list[TraceRequest] = []
    same_time = groupby(trace.requests, key=attrgetter("arrival_s"))
    for (tick_s, group), distance_s in zip(same_time, [*distances, usual_s], strict=True):
        requests = list(group)
        offsets = sorted(rng.uniform(0, min(distance_s, usual_s)) for _ in requests) if len(requests) > 1 else [0.0]
        spread += (replace(r, arrival_s=tick_s + offset) for r, offset in zip(requests, offsets, strict=True))
    return replace(trace, requests=tuple(spread))


def _open(path: Path) -> BufferedIOBase:
    with path.open("rb") as file:
        compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip.open(path) if compressed else path.open("rb")


def _records(path: Path, suffix: str, file: BufferedIOBase) -> list[_Record]:
    lines = ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())
    parse: Callable[[str], _Record] = _parse_mooncake
    if suffix == ".csv":
        number, header = next(lines, (1, b""))
        with _blaming(path, number):
            parse = _csv_parser(header.decode("utf-8-sig"))
    records = []
    for number, line in lines:
        with _blaming(path, number):
            records.append(parse(line.decode("utf-8-sig")))
    return records


@contextmanager
def _blaming(path: Path, number: int) -> Iterator[None]:
    """Context manager: converts a parser's ValueError to a ConfigError with file and line."""
    try:
        yield
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error


def _parse_mooncake(line: str) -> _Record:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if missing := [name for name in MOONCAKE_FIELDS if name not in fields]:
        raise ValueError(f"no {', '.join(missing)}")
    num_prompt_tokens = _whole("input_length", fields["input_length"], at_least=1)
    return _Record(
        time_us=_from_milliseconds("timestamp", fields["timestamp"]),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=max(_whole("output_length", fields["output_length"], at_least=0), 1),
        block_ids=_full_blocks(fields["hash_ids"], num_prompt_tokens),
    )


def _full_blocks(hash_ids: object, num_prompt_tokens: int) -> tuple[int, ...]:
    """Return the ids of full blocks. The last id may stand for a partial block, which no prompt shares as a whole."""
    if not isinstance(hash_ids, list) or any(type(block) is not int for block in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    num_full = num_prompt_tokens // BLOCK_TOKENS
    if not num_full <= len(hash_ids) <= math.ceil(num_prompt_tokens / BLOCK_TOKENS):
        raise ValueError(
            f"{len(hash_ids)} hash_ids do not fit an input_length of {num_prompt_tokens} in blocks of {BLOCK_TOKENS}"
        )
    return tuple(hash_ids[:num_full])


def _csv_parser(header: str) -> Callable[[str], _Record]:
    columns = tuple(_fields(header))
    if columns not in CSV_TIMES:
        known = " or ".join(",".join(known) for known in CSV_TIMES)
        raise ValueError(f"the header must be {known}, not {header!r}")
    return partial(_parse_csv, columns)


def _parse_csv(columns: tuple[str, ...], line: str) -> _Record:
    fields = _fields(line)
    if len(fields) != len(columns):
        raise ValueError(f"{len(fields)} fields where the header has {len(columns)}")
    numbers = [int(field) if field.isdecimal() else field for field in fields[1:]]
    return _Record(
        time_us=CSV_TIMES[columns](columns[0], fields[0]),
        num_prompt_tokens=_whole(columns[1], numbers[0], at_least=1),
        num_output_tokens=max(_whole(columns[2], numbers[1], at_least=0), 1),
        block_ids=None,
    )


def _fields(line: str) -> list[str]:
    return [field.strip() for field in next(csv.reader([line]), [])]


def _whole(name: str, value: object, *, at_least: int) -> int:
    if type(value) is not int or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
    return value


def _from_milliseconds(name: str, value: object) -> int:
    """Return the microseconds of a number of milliseconds, given as a JSON number or text."""
    try:
        milliseconds = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        milliseconds = math.nan
    if isinstance(value, bool) or not math.isfinite(milliseconds):
        raise ValueError(f"{name} must be a number of milliseconds, not {value!r}")
    return round(milliseconds * 1000)


def _from_iso(name: str, value: str) -> int:
    """Return the microseconds since 1970. A seventh fractional digit is dropped; without a zone the time is UTC."""
    try:
        time = datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an ISO date and time, not {value!r}") from error
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH) // timedelta(microseconds=1)


CSV_TIMES: dict[tuple[str, ...], Callable[[str, str], int]] = {
    ("timestamp_ms", "input_length", "output_length"): _from_milliseconds,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _from_iso,
}


def _trace(name: str, records: list[_Record]) -> Trace:
    records.sort(key=attrgetter("time_us"))
    fresh_ids = count()
    requests = (
        TraceRequest(
            arrival_s=(record.time_us - records[0].time_us) / 1e6,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_output_tokens,
            block_ids=tuple(islice(fresh_ids, record.num_prompt_tokens // BLOCK_TOKENS))
            if record.block_ids is None
            else record.block_ids,
        )
        for record in records
    )
    return Trace(name=name, block_tokens=BLOCK_TOKENS, requests=tuple(requests))
