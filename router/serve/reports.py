"""Records the workers' reports of prompts and KV transfers: in the metrics, and for placement to learn from."""

from __future__ import annotations

import time

from baton.cluster import Worker
from baton.messages import PrefillReport, Ticket, Transferred
from baton.telemetry.instruments import Instruments
from router.placement import PriceFit
from router.placement.pool_view import HintTracker
from router.serve.choice import Attempt
from router.serve.decisions import MeasuredSeconds
from router.serve.events import EventKind


class Reports:
    """Recorder of the reports of one router's attempts."""

    def __init__(self, *, hints: HintTracker, prices: PriceFit, instruments: Instruments) -> None:
        self._hints = hints
        self._prices = prices
        self._instruments = instruments

    def room(self, attempt: Attempt) -> None:
        """Record that the decode worker has room for an attempt whose prompt another worker computes."""
        choice, now_s, worker_id = attempt.choice, time.monotonic(), attempt.assignment.placement.decode_worker
        choice.stages.has_room(now_s)
        if choice.decision is not None and attempt.spec.attempt == 0:
            choice.decision.measured.room_s = choice.stages.noted[-1].took_s
        choice.events.note(
            now_s, EventKind.ROOM, f"{attempt.assignment.decode.info.label} has room", attempt.spec.attempt, worker_id
        )

    def prefill(self, attempt: Attempt, report: PrefillReport) -> None:
        """Record that the prompt is computed and the first token has arrived."""
        hint, choice = attempt.assignment.hint, attempt.choice
        if attempt.spec.sampling.prompt_logprobs is not None:
            choice.prompt_scores = report.prompt_scores
        if hint is None:
            return  # a migration has neither a wait in a queue nor a first token to record
        # Pulled blocks may be evicted before the worker looks the prefix up, so the difference may be negative.
        self._hints.settle(hint, max(0, report.num_cached_tokens - report.num_pulled_tokens))
        if choice.num_cached_tokens is None and not choice.emitted:
            choice.num_cached_tokens = report.num_cached_tokens
        if report.num_pulled_tokens:
            self._prices.pulled(report.num_pulled_tokens, report.pull_s)
        now_s = time.monotonic()
        choice.stages.computed(now_s, report.prefill_s, report.room_s)
        elapsed_s = now_s - choice.began_s
        worker_id = attempt.assignment.placement.computes
        text = _computed_text(report, attempt.assignment.prefill or attempt.assignment.decode)
        choice.events.note(now_s, EventKind.COMPUTED, text, attempt.spec.attempt, worker_id)
        if choice.decision is not None and attempt.spec.attempt == 0:
            choice.decision.ttft_s = elapsed_s
            _measure(choice.decision.measured, report)
        prediction = attempt.assignment.placement.prediction
        for what, predicted_s, measured_s in (
            ("ttft", prediction.ttft_s, elapsed_s),
            ("compute", prediction.compute_s, report.prefill_s),
        ):
            if measured_s > 0:
                self._instruments.prediction_error.record(abs(predicted_s - measured_s) / measured_s, {"of": what})

    def kv_transfer(self, ticket: Ticket, attempt: Attempt, report: Transferred) -> None:
        """Record the prefill worker's report of the KV transfer."""
        if attempt.assignment.moves_from is None:
            self._note_kv_transfer(attempt, report)
        self._prices.transferred(ticket.num_tokens - ticket.skip_tokens, report.exposed_s)
        self._instruments.transfer_duration.record(report.transfer_s)
        self._instruments.transfer_bytes.add(report.num_bytes)

    def _note_kv_transfer(self, attempt: Attempt, report: Transferred) -> None:
        choice, now_s, worker_id = attempt.choice, time.monotonic(), attempt.assignment.placement.decode_worker
        choice.stages.transferred(now_s, report.exposed_s)
        if choice.decision is not None and attempt.spec.attempt == 0:
            choice.decision.measured.exposed_s = report.exposed_s
        text = (
            f"KV is on {attempt.assignment.decode.info.label}: {report.num_bytes / 2**20:,.1f} MiB in "
            f"{report.transfer_s:.3f} s, of which {report.exposed_s:.3f} s after the prompt was computed"
        )
        choice.events.note(now_s, EventKind.TRANSFERRED, text, attempt.spec.attempt, worker_id)


def _measure(measured: MeasuredSeconds, report: PrefillReport) -> None:
    """Record a worker's times for a prompt. `room_s` comes from the report if the worker also decodes."""
    if measured.room_s is None:
        measured.room_s = report.room_s
    measured.wait_s = max(0.0, report.queue_s - report.pull_s - report.room_s)
    measured.pull_s, measured.compute_s = report.pull_s, report.prefill_s


def _computed_text(report: PrefillReport, worker: Worker) -> str:
    """Describe the time that a worker needed for a prompt."""
    text = f"{worker.info.label} has the first token: {report.queue_s:.3f} s in its queue"
    if report.num_pulled_tokens:
        text += f", {report.pull_s:.3f} s of them pulling {report.num_pulled_tokens} tokens"
    return f"{text}, {report.prefill_s:.3f} s computing; {report.num_cached_tokens} tokens were cached"
