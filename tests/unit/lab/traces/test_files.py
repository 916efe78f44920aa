"""Traces as the simulator gets them: read from small real files, reshaped, generated."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from baton.errors import ConfigError
from lab.traces.files import read_trace, spread_ticks
from lab.traces.generator import Conversations, LogNormal, generate
from lab.traces.shape import during, faster, first, scaled
from lab.traces.trace import Trace, TraceRequest

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
PLAIN_HEADER = "timestamp_ms,input_length,output_length"


def mooncake(timestamp: object, input_length: object, output_length: object, hash_ids: object) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}
    )


def written(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def arriving(*arrivals_s: float) -> Trace:
    """Requests told apart by the lengths of their outputs: 1, 2, and so on."""
    requests = tuple(TraceRequest(arrival_s, 100, n, ()) for n, arrival_s in enumerate(arrivals_s, 1))
    return Trace(name="arriving", block_tokens=512, requests=requests)


def arrivals(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


def outputs(trace: Trace) -> list[int]:
    return [request.num_output_tokens for request in trace.requests]


# Reading


@pytest.mark.parametrize("name", ["talk.jsonl", "talk.jsonl.gz"])
def test_mooncake_keeps_the_ids_of_full_blocks(tmp_path: Path, name: str) -> None:
    path = written(
        tmp_path,
        name,
        mooncake(500, 1300, 20, [0, 7, 8]),
        "",
        mooncake(3500, 1024, 0, [0, 7]),
        mooncake(3750, 9, 5, []),
    )
    assert read_trace(path) == Trace(
        name="talk",
        block_tokens=512,
        requests=(
            TraceRequest(0.0, 1300, 20, (0, 7)),
            TraceRequest(3.0, 1024, 1, (0, 7)),
            TraceRequest(3.25, 9, 5, ()),
        ),
    )


@pytest.mark.parametrize("name", ["code.csv", "code.csv.gz"])
@pytest.mark.parametrize(
    ("header", "first_time", "second_time"),
    [
        (PLAIN_HEADER, "10", "4325.5"),
        (AZURE_HEADER, "2023-11-16 23:59:58.1234560", "2023-11-17 00:00:02.4389560"),
        (AZURE_HEADER, "2024-05-10 00:00:00.009930+00:00", "2024-05-10 01:00:04.325430+01:00"),
        (AZURE_HEADER, "2024-05-10 00:00:00", "2024-05-10 00:00:04.3155009"),
        (f"\ufeff{AZURE_HEADER}", "2024-05-10", "2024-05-10 00:00:04.3155"),
    ],
)
def test_azure_gives_every_prompt_blocks_of_its_own(
    tmp_path: Path, name: str, header: str, first_time: str, second_time: str
) -> None:
    path = written(tmp_path, name, header, f"{first_time},1030,44\r", "  ", f'"{second_time}", 1600,0')
    assert read_trace(path) == Trace(
        name="code",
        block_tokens=512,
        requests=(TraceRequest(0.0, 1030, 44, (0, 1)), TraceRequest(4.3155, 1600, 1, (2, 3, 4))),
    )


def test_requests_are_sorted_by_time_and_count_from_the_earliest(tmp_path: Path) -> None:
    lines = [mooncake(9000, 1, 3, [5]), mooncake(2000, 1, 1, [6]), mooncake(5000, 1, 2, [7])]
    trace = read_trace(written(tmp_path, "late.jsonl", *lines))
    assert (arrivals(trace), outputs(trace)) == ([0.0, 3.0, 7.0], [1, 2, 3])


def test_the_first_bytes_tell_whether_a_file_is_compressed(tmp_path: Path) -> None:
    unpacked = written(tmp_path, "a.jsonl", mooncake(0, 512, 1, [3])).rename(tmp_path / "b.jsonl.gz")
    assert read_trace(unpacked).requests == (TraceRequest(0.0, 512, 1, (3,)),)


def test_reading_spreads_mooncakes_ticks_and_leaves_azures_times_alone(tmp_path: Path) -> None:
    times = [0, 0, 3000, 3000]
    ticks = written(tmp_path, "ticks.jsonl", *(mooncake(time, 1, 1, [n]) for n, time in enumerate(times)))
    exact = written(tmp_path, "exact.csv", PLAIN_HEADER, *(f"{time},1,1" for time in times))
    as_recorded = read_trace(ticks, spread_seed=None)
    assert arrivals(as_recorded) == arrivals(read_trace(exact)) == [0, 0, 3, 3]
    assert read_trace(ticks) == spread_ticks(as_recorded, 0) != as_recorded
    assert read_trace(ticks, spread_seed=4) == spread_ticks(as_recorded, 4) != read_trace(ticks)


GOOD = mooncake(0, 512, 1, [0])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"not JSON: Expecting property name .* at column 2"),
        ("[1]", "not a JSON object"),
        ('{"timestamp": 0, "input_length": 1}', "no output_length, hash_ids"),
        (mooncake("soon", 1, 1, [0]), "timestamp must be a number of milliseconds, not 'soon'"),
        (mooncake(True, 1, 1, [0]), "timestamp must be a number of milliseconds, not True"),
        (mooncake(float("inf"), 1, 1, [0]), "timestamp must be a number of milliseconds, not inf"),
        (mooncake(10**400, 1, 1, [0]), "timestamp must be a number of milliseconds, not 10"),
        (mooncake(0, 0, 1, []), "input_length must be a whole number of at least 1, not 0"),
        (mooncake(0, 5.5, 1, [0]), "input_length must be a whole number of at least 1, not 5.5"),
        (mooncake(0, 5, -1, [0]), "output_length must be a whole number of at least 0, not -1"),
        (mooncake(0, 5, True, [0]), "output_length must be a whole number of at least 0, not True"),
        (mooncake(0, 512, 1, 7), "hash_ids must be a list of whole numbers"),
        (mooncake(0, 512, 1, ["7"]), "hash_ids must be a list of whole numbers"),
        (mooncake(0, 1024, 1, [7]), "1 hash_ids do not fit an input_length of 1024 in blocks of 512"),
        (mooncake(0, 1024, 1, [7, 8, 9]), "3 hash_ids do not fit an input_length of 1024 in blocks of 512"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path, "bad.jsonl.gz", GOOD, "", line)
    with pytest.raises(ConfigError, match=f"{path}, line 3: {words}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        (PLAIN_HEADER, "1,2", "2 fields where the header has 3"),
        (PLAIN_HEADER, "1,2,3,4", "4 fields where the header has 3"),
        (PLAIN_HEADER, "then,2,3", "timestamp_ms must be a number of milliseconds, not 'then'"),
        (PLAIN_HEADER, "nan,2,3", "timestamp_ms must be a number of milliseconds, not 'nan'"),
        (PLAIN_HEADER, "1,-2,3", "input_length must be a whole number of at least 1, not '-2'"),
        (AZURE_HEADER, "1,2,3", "TIMESTAMP must be an ISO date and time, not '1'"),
        (AZURE_HEADER, "2024-05-10,0,3", "ContextTokens must be a whole number of at least 1, not 0"),
        (AZURE_HEADER, "2024-05-10,2,", "GeneratedTokens must be a whole number of at least 0, not ''"),
        (AZURE_HEADER, f"2024-05-10,2,{'3' * 200_000}", "field larger than field limit"),
    ],
)
def test_a_bad_line_of_csv_is_named(tmp_path: Path, header: str, line: str, words: str) -> None:
    path = written(tmp_path, "bad.csv", "", header, line)
    with pytest.raises(ConfigError, match=f"{path}, line 3: {words}"):
        read_trace(path)


def test_an_unknown_header_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "bad.csv", "", "time,in,out", "1,2,3")
    words = f"line 2: the header must be {PLAIN_HEADER} or {AZURE_HEADER}, not 'time,in,out'"
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\n")
    with pytest.raises(ConfigError, match="line 2: 'utf-8' codec can't decode byte 0xff"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("trace.parquet", [GOOD], r"trace.parquet: a trace's name ends in .jsonl, .jsonl.gz, .csv or .csv.gz"),
        ("trace.gz", [GOOD], r"trace.gz: a trace's name ends in"),
        ("empty.jsonl", [""], "empty.jsonl holds no requests"),
        ("empty.csv", [PLAIN_HEADER, ""], "empty.csv holds no requests"),
        ("empty.csv.gz", [""], "empty.csv.gz, line 1: the header must be .*, not ''"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, name: str, lines: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(written(tmp_path, name, *lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*none.csv: .*No such file"):
        read_trace(tmp_path / "none.csv")
    whole = written(tmp_path, "cut.jsonl.gz", *[mooncake(n, 512, 1, [n]) for n in range(50)])
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"cannot read the trace .*cut.jsonl.gz: Compressed file ended"):
        read_trace(whole)
    whole.write_bytes(data[:20] + b"\xff" * 20 + data[40:])
    with pytest.raises(ConfigError, match=r"cannot read the trace .*cut.jsonl.gz: "):
        read_trace(whole)


# Ticks


def test_ticks_are_spread_evenly_over_the_time_until_the_next() -> None:
    trace = arriving(*[tick_s for tick_s in (0.0, 3.0, 6.0) for _ in range(2000)])
    spread = spread_ticks(trace, seed=1)
    assert outputs(spread) == outputs(trace)
    assert arrivals(spread) == sorted(arrivals(spread))
    for tick, tick_s in enumerate((0.0, 3.0, 6.0)):
        offsets = [arrival_s - tick_s for arrival_s in arrivals(spread)[2000 * tick : 2000 * (tick + 1)]]
        assert min(offsets) >= 0
        assert max(offsets) <= 3
        for quarter in range(4):
            share = sum(0.75 * quarter <= offset < 0.75 * (quarter + 1) for offset in offsets) / len(offsets)
            assert share == pytest.approx(0.25, abs=0.04)


def test_spreading_is_the_same_for_the_same_seed_only() -> None:
    trace = arriving(0, 0, 3, 3)
    assert spread_ticks(trace, seed=1) == spread_ticks(trace, seed=1) != spread_ticks(trace, seed=2)


def test_a_timestamp_of_one_request_stays() -> None:
    spread = arrivals(spread_ticks(arriving(0, 3, 3, 6, 9), seed=1))
    assert [spread[0], *spread[3:]] == [0, 6, 9]
    assert 3 < spread[1] < spread[2] < 6


def test_a_tick_before_a_pause_lasts_as_long_as_others() -> None:
    spread = arrivals(spread_ticks(arriving(0, 3, *[6] * 50, 900, 903, 906), seed=1))
    assert max(spread[2:52]) <= 9


def test_a_trace_of_one_timestamp_tells_no_tick_and_stays() -> None:
    trace = arriving(5, 5, 5)
    assert spread_ticks(trace, seed=1) == trace


# Shape


THREE = Trace(
    name="three",
    block_tokens=512,
    requests=(
        TraceRequest(0.0, 1100, 64, (0, 1)),
        TraceRequest(2.0, 2100, 96, (0, 1, 2, 3)),
        TraceRequest(6.0, 1030, 20, (0, 9)),
    ),
)


def test_the_ceiling_by_hand() -> None:
    """Nothing of 1100, then blocks 0 and 1 of 2100, then block 0 of 1030."""
    assert THREE.ceiling == pytest.approx((0 + 2 * 512 + 512) / (1100 + 2100 + 1030))
    assert Trace(name="none", block_tokens=512, requests=()).ceiling == 0


def test_a_block_behind_a_new_one_is_no_hit() -> None:
    requests = (TraceRequest(0, 1024, 1, (1, 2)), TraceRequest(1, 1024, 1, (3, 2)))
    assert Trace(name="behind", block_tokens=512, requests=requests).ceiling == 0


def test_faster_changes_arrivals_alone() -> None:
    quick = faster(THREE, 4)
    assert arrivals(quick) == [0.0, 0.5, 1.5]
    assert faster(quick, 0.25) == THREE


def test_first_takes_the_earliest() -> None:
    assert first(THREE, 2).requests == THREE.requests[:2]
    assert first(THREE, 9) == THREE


def test_during_takes_what_arrives_in_between_and_starts_anew() -> None:
    assert during(THREE, 1.5, 6.0).requests == (replace(THREE.requests[1], arrival_s=0.5),)
    assert arrivals(during(THREE, 2.0, 6.1)) == [0.0, 4.0]


def test_scaled_keeps_a_block_for_a_block() -> None:
    assert scaled(THREE, 32, 16) == Trace(
        name="three",
        block_tokens=16,
        requests=(
            TraceRequest(0.0, 34, 2, (0, 1)),
            TraceRequest(2.0, 65, 3, (0, 1, 2, 3)),
            TraceRequest(6.0, 32, 1, (0, 9)),
        ),
    )


def test_scaled_merges_blocks_and_drops_those_that_are_full_no_more() -> None:
    requests = (TraceRequest(0.0, 2000, 5, (0, 1, 2)), TraceRequest(1.0, 20, 5, ()))
    assert scaled(replace(THREE, requests=requests), 64, 16).requests == (
        TraceRequest(0.0, 31, 1, (1,)),
        TraceRequest(1.0, 1, 1, ()),
    )
    assert [r.block_ids for r in scaled(THREE, 64, 16).requests] == [(1,), (1, 3), (9,)]


def test_shapes_that_make_no_sense_are_refused() -> None:
    for factor in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="speed must be more than 0, got"):
            faster(THREE, factor)
    with pytest.raises(ConfigError, match="at least 1 request, got 0"):
        first(THREE, 0)
    with pytest.raises(ConfigError, match="three has no requests between 3 and 6 s"):
        during(THREE, 3, 6)
    for divisor, block_tokens in ((32, 8), (48, 16), (0, 16), (-32, 16)):
        with pytest.raises(ConfigError, match="multiple of the trace's own block of 512 tokens"):
            scaled(THREE, divisor, block_tokens)


# Generator


def test_generated_conversations_have_the_published_statistics() -> None:
    """Seed 0 gives 8,172 requests, 12,369 and 344 tokens, 0.373; other seeds lie up to 5 % around the published."""
    trace = generate(Conversations())
    num_requests = len(trace.requests)
    assert num_requests == pytest.approx(7900, rel=0.08)
    assert sum(r.num_prompt_tokens for r in trace.requests) / num_requests == pytest.approx(12_035, rel=0.06)
    assert sum(r.num_output_tokens for r in trace.requests) / num_requests == pytest.approx(343, rel=0.03)
    assert trace.ceiling == pytest.approx(0.36, abs=0.025)
    assert arrivals(trace) == sorted(arrivals(trace))
    assert max(arrivals(trace)) < 2400
    assert max(r.num_prompt_tokens for r in trace.requests) <= 131_072
    assert all(len(r.block_ids) == r.num_prompt_tokens // 512 for r in trace.requests)


def test_generating_is_the_same_for_the_same_seed_only() -> None:
    short = Conversations(duration_s=60)
    assert generate(short, seed=1) == generate(short, seed=1) != generate(short, seed=2)


def sessions(trace: Trace, num_shared: int) -> list[list[TraceRequest]]:
    """Requests by their first block of a session's own."""
    by_block: dict[int, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        by_block[request.block_ids[num_shared]].append(request)
    return list(by_block.values())


def test_turns_extend_the_prompt_before_and_its_answer() -> None:
    shape = Conversations(duration_s=2000, sessions_per_s=0.1, continue_p=0.7, system_tokens=70, block_tokens=32)
    trace = generate(shape, seed=3)
    turns = sessions(trace, num_shared=2)
    assert {r.block_ids[:2] for r in trace.requests} == {(0, 1)}
    assert max(map(len, turns)) >= 5
    for before, after in (pair for session in turns for pair in pairwise(session)):
        assert after.arrival_s > before.arrival_s
        assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
        assert after.block_ids[: len(before.block_ids)] == before.block_ids
    own_ids = [set(session[-1].block_ids[2:]) for session in turns]
    assert 2 + sum(map(len, own_ids)) == len({0, 1}.union(*own_ids))


def test_sessions_think_times_and_numbers_of_turns_follow_their_parameters() -> None:
    shape = Conversations(
        duration_s=20_000,
        sessions_per_s=0.2,
        continue_p=0.5,
        think_s=LogNormal(mean=8.0, sigma=0.5),
        first_message_tokens=LogNormal(mean=2000.0, sigma=0.1),
    )
    trace = generate(shape)
    turns = sessions(trace, num_shared=1)
    starts = sorted(session[0].arrival_s for session in turns)
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    mean_pause = sum(pauses) / len(pauses)
    assert mean_pause == pytest.approx(5.0, rel=0.06)
    assert (sum((pause - mean_pause) ** 2 for pause in pauses) / len(pauses)) ** 0.5 == pytest.approx(5.0, rel=0.08)
    assert len(trace.requests) / len(turns) == pytest.approx(2.0, rel=0.06)
    thoughts = [after.arrival_s - before.arrival_s for session in turns for before, after in pairwise(session)]
    assert sum(thoughts) / len(thoughts) == pytest.approx(8.0, rel=0.04)


def test_a_session_ends_before_it_outgrows_the_context() -> None:
    shape = Conversations(duration_s=600, continue_p=0.9, max_prompt_tokens=5000)
    lengths = [request.num_prompt_tokens for request in generate(shape).requests]
    assert max(lengths) == 5000
    assert min(lengths) > 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"duration_s": 0}, "duration_s must be more than 0, got 0"),
        ({"sessions_per_s": float("nan")}, "sessions_per_s must be more than 0, got nan"),
        ({"block_tokens": -1}, "block_tokens must be more than 0, got -1"),
        ({"continue_p": 1}, "continue_p must be at least 0 and less than 1, got 1"),
        ({"system_tokens": -1}, "system_tokens must be at least 0 and less than max_prompt_tokens, got -1"),
        ({"max_prompt_tokens": 512}, "system_tokens must be at least 0 and less than max_prompt_tokens, got 512"),
        ({"think_s": LogNormal(0, 1)}, "think_s must have a mean of more than 0, got 0"),
    ],
)
def test_conversations_that_make_no_sense_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(Conversations(), **change)  # type: ignore[arg-type]


def test_a_time_too_short_for_any_session_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no session starts within 0\.001 s"):
        generate(Conversations(duration_s=0.001))
