"""`baton bench` before there is a cluster: prompts, plans, figures by hand; replays against a router of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from rich.console import Console

from baton.api import Timing, Usage
from baton.costs import StepCosts
from baton.errors import ConfigError, InvalidRequest, NoWorker, Overloaded, WorkerFailed
from baton.rpc import RpcServer
from baton.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from lab.bench.connection import BenchConnection, BenchedModel, ServingWorker
from lab.bench.options import BenchOptions
from lab.bench.prompts import Prompts
from lab.bench.replay import Load, Replay, ReplayedRequest, check, replay
from lab.bench.report import BenchReport, measured, notes_of, table_of
from lab.simulate.report import Figures
from lab.traces.fit_to_model import FittedTrace, plan_for
from lab.traces.shape import TraceOptions
from lab.traces.trace import Trace, TraceRequest
from router.placement import Objective

BLOCK = 16
PROMPTS = Prompts(seed=0, vocab_size=1000, block_tokens=BLOCK)
OBJECTIVE = Objective(ttft_s=1.0, itl_s=0.1)


def request(arrival_s: float, num_prompt: int, num_output: int, *blocks: int) -> TraceRequest:
    return TraceRequest(arrival_s, num_prompt, num_output, blocks)


def trace(*requests: TraceRequest) -> Trace:
    return Trace("talk", BLOCK, requests)


# Prompts


def test_equal_blocks_give_equal_tokens_and_the_rest_is_a_requests_own() -> None:
    first = PROMPTS.token_ids(0, request(0, 40, 1, 7, 8))
    second = PROMPTS.token_ids(1, request(0, 50, 1, 7, 9, 8))
    assert (len(first), len(second)) == (40, 50)
    assert first[:BLOCK] == second[:BLOCK]
    assert first[BLOCK : 2 * BLOCK] == second[2 * BLOCK : 3 * BLOCK] != second[BLOCK : 2 * BLOCK]
    assert first[32:] == PROMPTS.token_ids(0, request(0, 40, 1, 7, 8))[32:]
    assert first[32:34] != second[48:], "what no block covers is shared with nobody"
    assert all(0 <= token_id < 1000 for token_id in first + second)
    assert max(PROMPTS.token_ids(0, request(0, 4000, 1))) > 990


def test_tokens_are_the_same_on_every_machine_for_the_same_seed_only() -> None:
    """The numbers are what SHAKE-128 gave when this was written."""
    one = request(0, 18, 1, 7)
    assert PROMPTS.token_ids(0, one) == [
        883,
        24,
        244,
        994,
        40,
        411,
        869,
        784,
        564,
        791,
        755,
        443,
        203,
        632,
        335,
        362,
        384,
        366,
    ]
    assert replace(PROMPTS, seed=1).token_ids(0, one)[:BLOCK] != PROMPTS.token_ids(0, one)[:BLOCK]


# Plans


def test_prompts_are_cut_where_the_model_is_too_small_and_keep_their_prefix() -> None:
    plan = plan_for(trace(request(0, 60, 4, 1, 2, 3), request(1, 61, 5, 1, 2, 3), request(2, 10, 64)), 64)
    assert plan == FittedTrace(
        trace(request(0, 60, 4, 1, 2, 3), request(1, 59, 5, 1, 2, 3)), num_clipped=1, num_skipped=1
    )
    assert plan_for(trace(request(0, 60, 40, 1, 2, 3)), 64).trace.requests == (request(0, 24, 40, 1),)


def test_outputs_are_cut_where_that_is_asked_for() -> None:
    plan = plan_for(trace(request(0, 60, 40, 1), request(1, 9, 2)), 64, max_output=4)
    assert plan == FittedTrace(trace(request(0, 60, 4, 1), request(1, 9, 2)), num_clipped=0, num_skipped=0)


def test_a_trace_of_which_nothing_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request of talk fits the model's 64 tokens; divide the lengths"):
        plan_for(trace(request(0, 1, 64)), 64)


# Figures


def observed(
    one: TraceRequest,
    *token_times: tuple[float, int],
    cached: int = 0,
    prefill: str = "p0",
    decode: str = "d0",
    late_s: float = 0.0,
    retries: int = 0,
) -> ReplayedRequest:
    """A request that was served."""
    usage = Usage(one.num_prompt_tokens, one.num_output_tokens, cached)
    mode = "disaggregated" if prefill else "aggregated"
    timing = Timing(prefill_worker=prefill, decode_worker=decode, mode=mode, retries=retries)
    return ReplayedRequest(
        request=one,
        sent_s=one.arrival_s + late_s,
        outcome="served",
        error=None,
        token_times=list(token_times),
        usage=usage,
        timing=timing,
    )


def refused(one: TraceRequest, error: Exception) -> ReplayedRequest:
    result = ReplayedRequest(request=one, sent_s=one.arrival_s)
    assert isinstance(error, (Overloaded, WorkerFailed))
    result.refuse(error)
    return result


def report(
    *done: ReplayedRequest, workers: dict[str, list[str]] | None = None, interrupted: bool = False
) -> BenchReport:
    plan = FittedTrace(trace(*(one.request for one in done)), 0, 0)
    return measured(Replay(list(done), interrupted), plan, workers or {}, OBJECTIVE)


def test_a_requests_times_count_from_when_it_was_due() -> None:
    one = observed(request(10.0, 5, 4), (10.5, 1), (10.6, 1), (11.0, 2), late_s=0.25)
    assert one.late_s == pytest.approx(0.25)
    assert one.ttft_s == pytest.approx(0.5), "not 0.25"
    assert one.itl_s == pytest.approx(0.5 / 3)
    assert observed(request(0, 5, 1), (2.0, 1)).itl_s == 0.0


def test_tokens_of_one_message_come_at_the_same_time() -> None:
    one = observed(request(0, 5, 7), (1.0, 2), (1.5, 1), (2.5, 4))
    assert list(one.intervals) == [(0.0, 1), (0.5, 1), (1.0, 1), (0.0, 3)]
    assert sum(count for _, count in one.intervals) == 6
    assert sum(gap_s * count for gap_s, count in one.intervals) == pytest.approx(6 * one.itl_s)


def test_the_figures_by_hand() -> None:
    result = report(
        observed(request(0.0, 100, 3), (0.5, 1), (0.6, 1), (0.7, 1), cached=60, prefill="p0"),
        observed(request(2.0, 50, 2), (3.5, 1), (3.6, 1), prefill="p1", late_s=0.5, retries=2),  # too late
        observed(request(3.0, 50, 2), (3.5, 1), (3.8, 1), cached=20, prefill="p1"),  # too slow
        observed(request(4.0, 10, 1), (4.9, 1), prefill="", late_s=0.005),
        refused(request(5.0, 10, 1), Overloaded("full")),
        refused(request(8.0, 10, 1), WorkerFailed("gone")),
        ReplayedRequest(request=request(9.0, 10, 1), sent_s=9.0),
    )
    assert (result.num_requests, result.num_served, result.num_rejected, result.num_failed) == (6, 4, 1, 1)
    assert result.num_cancelled == 1
    assert result.hit_rate == pytest.approx(80 / 210)
    assert result.computed_tokens == {"p0": 40, "p1": 80, "d0": 10}
    assert result.imbalance == pytest.approx(80 / 60), "the decode worker's short prompt does not count"
    assert result.ttft_s == pytest.approx((0.5, 1.5, 1.5))
    assert result.itl_s == pytest.approx((0.1, 0.3, 0.3))
    assert result.good_share == pytest.approx(2 / 6)
    assert result.goodput_per_s == pytest.approx(2 / 8.0), "by the seconds of the trace that were judged"
    assert result.num_late == 1
    assert result.latest_s == pytest.approx(0.5)
    assert result.modes == {"aggregated": 1, "disaggregated": 3}
    assert result.num_retries == 2
    assert result.lasted_s == 4.9
    assert result.output_tokens_per_s == pytest.approx(8 / 4.9)
    assert result.errors == {
        "Overloaded": {"count": 1, "example": "full"},
        "WorkerFailed": {"count": 1, "example": "gone"},
    }


def test_workers_with_nothing_to_do_count_in_the_imbalance() -> None:
    """What a router that sends everything to one worker must not hide."""
    everything_to_one = [observed(request(n, 100, 1), (n + 0.1, 1)) for n in range(3)]
    workers = {"prefill": ["p0", "p1", "p2", "p3"], "decode": ["d0", "d1"]}
    assert report(*everything_to_one, workers=workers).imbalance == 4.0
    assert report(*everything_to_one).imbalance == 1.0, "no more can be known"
    aggregated = [observed(request(n, 100, 1), (n + 0.1, 1), prefill="") for n in range(3)]
    assert report(*aggregated, workers=workers).imbalance == 2.0


def test_the_ceiling_is_that_of_the_requests_that_count() -> None:
    first, second = request(0, 32, 1, 1, 2), request(1, 48, 1, 1, 2, 3)
    served = observed(first, (0.1, 1))
    assert report(served, observed(second, (1.1, 1))).ceiling == pytest.approx(32 / 80)
    assert report(served, ReplayedRequest(request=second, sent_s=1.0)).ceiling == 0.0


def test_a_replay_of_which_nothing_came_has_figures_too() -> None:
    result = report(interrupted=True)
    assert (result.num_requests, result.hit_rate, result.goodput_per_s, result.imbalance) == (0, 0.0, 0.0, 0.0)
    assert result.ttft_s == (0.0, 0.0, 0.0)


def test_the_report_has_the_simulators_figures_and_fits_a_terminal() -> None:
    slow = observed(request(0.0, 100, 2), (100.5, 1), (112.7, 1), cached=60)
    result = replace(
        report(slow, refused(request(1, 1, 1), Overloaded("full")), interrupted=True), num_clipped=3, num_unsent=9
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table_of("talk", result))
    row = next(line for line in captured.get().splitlines() if line.startswith("measured"))
    assert row.split()[1:] == ["0.600", "1.00", "100.50/100.50/100.50", "12200/12200/12200", "0.00", "0.0%"]
    assert {*Figures.__dataclass_fields__} < {*result.as_dict()}
    assert json.loads(json.dumps(result.as_dict()))["ttft_s"] == [100.5, 100.5, 100.5]
    notes = "\n".join(notes_of(result))
    for words in (
        "2 requests in 112.7 s: 1 served, 1 rejected for lack of capacity, 0 failed",
        "interrupted: 0 requests cancelled, 9 not sent",
        "1 Overloaded, such as: full",
        "served: 1 disaggregated; 0 retries; 0.0 tokens/s, 1.00 a message",
        "too long for the model: 3 prompts cut, 0 requests left out",
        "sent late, by more than 10 ms: 0",
    ):
        assert words in notes


# Replays


STEPS = StepCosts(
    s_overhead=0.5, s_per_token=0.25, s_per_pair=0.125, s_weights=2.0, s_per_sequence=3.0, s_per_kv_token=4.0
)
HANGS = 15
"""Prompts of so many tokens get no answer."""


class ScriptedRouter(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers after `answer_s`, two tokens a message. With `error`, prompts of 13 tokens bring bad luck."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.keys: set[str] = set()
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.hanging: asyncio.Queue[int] = asyncio.Queue()
        self.left: asyncio.Queue[int] = asyncio.Queue()
        """Each gets an entry for every request that hangs, or that is over here."""
        self.answer_s = 0.0
        self.error: Exception | None = None
        self.short_of = 0

    async def ListModels(self, message: Any, context: Any) -> inference_pb2.ListModelsResponse:  # noqa: N802
        self._note_key(context)
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="abacus", max_model_len=64)])

    async def GetStatus(self, message: Any, context: Any) -> admin_pb2.GetStatusResponse:  # noqa: N802
        self._note_key(context)
        if self.error is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "operators only")
        ids = (("p0", "prefill", "ready"), ("p1", "prefill", "dead"), ("d0", "decode", "ready"))
        costs = admin_pb2.StepCosts(**dataclasses.asdict(STEPS))
        blocks = admin_pb2.Blocks(total=100)
        return admin_pb2.GetStatusResponse(
            workers=[
                admin_pb2.Worker(id=i, role=r, state=s, costs=costs, blocks=blocks, block_size=16, chunk_tokens=512)
                for i, r, s in ids
            ]
        )

    async def Generate(  # noqa: N802
        self, message: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self._note_key(context)
        self.requests.append(message)
        if self.error is not None and len(message.token_ids.ids) in (1, 13):
            raise self.error
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            if len(message.token_ids.ids) == HANGS:
                self.hanging.put_nowait(HANGS)
                await asyncio.Event().wait()
            await asyncio.sleep(self.answer_s)
            num_tokens = message.sampling.max_tokens - self.short_of
            for start in range(0, num_tokens, 2):
                yield inference_pb2.GenerateResponse(token_ids=range(start, min(start + 2, num_tokens)))
            yield inference_pb2.GenerateResponse(
                finish_reason="length",
                usage=inference_pb2.Usage(prompt_tokens=len(message.token_ids.ids), completion_tokens=num_tokens),
                timing=inference_pb2.Timing(mode="disaggregated", prefill_worker="p0", decode_worker="d0"),
            )
        finally:
            self.num_in_flight -= 1
            self.left.put_nowait(len(message.token_ids.ids))

    def _note_key(self, context: Any) -> None:
        self.keys.add(dict(context.invocation_metadata()).get("authorization", ""))


def scripted() -> ScriptedRouter:
    return ScriptedRouter()  # type: ignore[abstract]  # what it does not answer, its base classes refuse


@contextlib.asynccontextmanager
async def serving(router: ScriptedRouter, api_key: str = "") -> AsyncIterator[BenchConnection]:
    server = RpcServer(())
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server.server)
    admin_pb2_grpc.add_AdminServicer_to_server(router, server.server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    connection = BenchConnection(f"127.0.0.1:{port}", api_key)
    try:
        yield connection
    finally:
        await connection.close()
        await server.stop(0)


def ignore(_: ReplayedRequest) -> None:
    pass


def load_of(sent: Trace, concurrency: int = 0) -> Load:
    return Load(trace=sent, prompts=PROMPTS, objective=OBJECTIVE, concurrency=concurrency)


async def test_requests_go_out_at_their_times_whatever_became_of_those_before() -> None:
    router = scripted()
    router.answer_s = 0.5
    sent = trace(*(request(0.05 * n, 20 + n, 3, 1) for n in range(5)))
    ended: list[ReplayedRequest] = []
    async with serving(router, "secret") as connection:
        result = await replay(load_of(sent), connection, ended.append)
    assert router.most_in_flight == 5
    by_length = {len(message.token_ids.ids): message for message in router.requests}  # a slow machine may reorder them
    assert sorted(by_length) == [20, 21, 22, 23, 24]
    assert list(by_length[22].token_ids.ids) == PROMPTS.token_ids(2, sent.requests[2])
    sampling = by_length[22].sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, True, 0.0)
    assert by_length[22].slo == inference_pb2.ServiceLevelObjective(ttft_ms=1000.0, itl_ms=100.0)
    assert router.keys == {"Bearer secret"}
    assert {id(one) for one in ended} == {id(one) for one in result.observed}
    for one in result.observed:
        assert one.outcome == "served"
        assert -0.002 < one.late_s < 2, "not before it is due, and not after those before are done"
        assert 0.49 < one.ttft_s < 5
        assert [count for _, count in one.token_times] == [2, 1]
        assert one.usage == Usage(one.request.num_prompt_tokens, 3, 0)


async def test_waiting_for_a_place_is_waiting_all_the_same() -> None:
    router = scripted()
    router.answer_s = 0.5
    async with serving(router) as connection:
        result = await replay(load_of(trace(*[request(0.0, 20, 1)] * 4), 2), connection, ignore)
    assert router.most_in_flight == 2
    lates = [one.late_s for one in result.observed]
    first_over_s = min(one.token_times[-1][0] for one in result.observed[:2])
    assert lates[1] < first_over_s <= lates[2], "two at once, and the third when one of them is over"
    assert all(one.ttft_s == one.token_times[0][0] for one in result.observed), "all were due at once"
    assert result.observed[3].ttft_s > 0.99
    assert router.keys == {""}


@pytest.mark.parametrize(
    ("error", "outcome"), [(Overloaded("full"), "rejected"), (WorkerFailed("gone"), "failed"), (KeyError(), "failed")]
)
async def test_what_is_refused_is_told_apart_and_stops_nothing(error: Exception, outcome: str) -> None:
    router = scripted()
    router.error = error
    async with serving(router) as connection:
        result = await replay(
            load_of(trace(request(0, 13, 1), request(0.01, 14, 1), request(0.02, 13, 1))),
            connection,
            ignore,
        )
    assert [one.outcome for one in result.observed] == [outcome, "served", outcome]
    assert str(error).strip("'") in str(result.observed[0].error)


async def test_an_answer_that_is_too_short_has_failed() -> None:
    router = scripted()
    router.short_of = 1
    async with serving(router) as connection:
        result = await replay(load_of(trace(request(0, 14, 4))), connection, ignore)
    assert result.observed[0].outcome == "failed"
    assert "have (14, 3) tokens, but (14, 4) were requested" in str(result.observed[0].error)


async def test_an_interrupt_cancels_what_runs_and_keeps_what_is_done() -> None:
    router = scripted()
    sent = trace(request(0, 14, 1), request(0.1, HANGS, 1), request(0.1, HANGS, 1), request(60, 16, 1))
    ended: asyncio.Queue[ReplayedRequest] = asyncio.Queue()

    async def press_ctrl_c() -> None:
        """Once one request is done and two hang."""
        await ended.get()
        for _ in range(2):
            await router.hanging.get()
        signal.raise_signal(signal.SIGINT)

    async with serving(router) as connection:
        pressing = asyncio.create_task(press_ctrl_c())
        result = await replay(load_of(sent), connection, ended.put_nowait)
        await pressing
        assert result.interrupted
        assert [one.outcome for one in result.observed] == ["served", "cancelled", "cancelled"]
        async with asyncio.timeout(20):
            for _ in result.observed:
                await router.left.get()
    assert router.num_in_flight == 0


async def test_what_is_served_and_who_serves_is_asked_first() -> None:
    router = scripted()
    async with serving(router) as connection:
        assert await connection.model() == BenchedModel("abacus", 64)
        assert await connection.workers() == [
            ServingWorker(id=name, role=role, costs=STEPS, num_blocks=100, block_tokens=16, chunk_tokens=512)
            for name, role in (("p0", "prefill"), ("d0", "decode"))
        ], "and not the dead one"
        await check(connection, PROMPTS, OBJECTIVE)
        assert [list(message.token_ids.ids) for message in router.requests] == [[999]]
        router.error = Overloaded("full")
        await check(connection, PROMPTS, OBJECTIVE)
        assert await connection.workers() == [], "not for this client; the replay goes on without"
        router.error = InvalidRequest("token id 999 is outside the vocabulary")
        with pytest.raises(InvalidRequest, match="outside the vocabulary; lower --vocab"):
            await check(connection, PROMPTS, OBJECTIVE)
        router.error = NoWorker("no worker is ready")
        with pytest.raises(NoWorker, match="no worker is ready"):
            await check(connection, PROMPTS, OBJECTIVE)


async def test_a_dead_router_is_told_in_a_sentence() -> None:
    async with serving(scripted()) as connection:
        address = connection.address
    connection = BenchConnection(address)
    with pytest.raises(
        NoWorker, match=rf"no router answers at {address} \(Connection refused\); start one with `baton up`"
    ):
        await connection.model()
    await connection.close()


# Options


OPTIONS = BenchOptions(
    trace=TraceOptions(path=None),
    address="127.0.0.1:1",
    api_key="",
    max_output=0,
    concurrency=0,
    vocab=None,
    ttft_ms=1.0,
    itl_ms=1.0,
)


def test_a_part_of_a_trace_made_smaller_and_faster() -> None:
    whole = TraceOptions(path=None).trace()
    part = TraceOptions(path=None, from_s=100.0, seconds=60.0, requests=50, scale=64, speed=2.0).trace()
    of_that_minute = [r for r in whole.requests if 100 <= r.arrival_s < 160][:50]
    assert [r.arrival_s * 2 + 100 for r in part.requests] == pytest.approx([r.arrival_s for r in of_that_minute])
    assert [r.num_prompt_tokens for r in part.requests] == [r.num_prompt_tokens // 64 for r in of_that_minute]
    assert (whole.block_tokens, part.block_tokens) == (512, 16)
    assert TraceOptions(path=None, seconds=60.0).trace().requests[-1].arrival_s < 60
    assert TraceOptions(path=None, from_s=2000.0).trace().requests[-1].arrival_s > 300


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scale": 0}, "--scale must be more than 0"),
        ({"from_s": -1.0}, "--from must be at least 0"),
        ({"speed": 0.0}, "a trace's speed must be more than 0"),
        ({"scale": 16}, "divisor times block must be a multiple of the trace's own block of 512 tokens"),
        ({"block": 16}, "1/1 of the lengths in blocks of 16 tokens: divisor times block must be a multiple"),
    ],
)
def test_parts_that_there_are_none_of_are_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        TraceOptions(path=None, **changes).trace()
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ttft_ms": 0.0}, "--ttft-ms must be more than 0, got 0.0"),
        ({"max_output": -1}, "--max-output must be at least 0"),
        ({"vocab": 0}, "--vocab must be 1 to 4294967296, got 0"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        replace(OPTIONS, **changes)
    assert sentence in str(error.value)
