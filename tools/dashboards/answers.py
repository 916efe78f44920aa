"""Overview section about responses: finish reasons, and lengths of responses and prompts."""

from __future__ import annotations

from tools.dashboards.model import OF_MODEL, OF_REQUESTED, Kind, Lead, Panel, Section

GENERATED = f"sum(rate(baton_generation_tokens_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
PROMPTS = f"sum(rate(baton_prompt_tokens_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
ENDS = f"sum(rate(baton_finished_choices_total{{$cluster, {OF_MODEL}}}[$__rate_interval]))"
BEGUN = f"sum(rate(gen_ai_server_time_to_first_token_seconds_count{{$cluster, {OF_REQUESTED}}}[$__rate_interval]))"


def heat(histogram: str, labels: str) -> dict[str, str]:
    """Return the query of the number of values in each bucket."""
    return {"{{le}}": f"sum by (le) (increase({histogram}_bucket{{$cluster{labels}}}[$__rate_interval]))"}


SECTION = Section(
    "Responses",
    (
        Panel(
            title="Finish reasons",
            description="Finished choices per second by reason. stop: an end-of-sequence token or a stop string; "
            "length: the token limit; tool_calls: after a tool call; content_filter: the operator's "
            "moderation. If most end by length, clients set the limit low, or the model does not stop.",
            unit="ops",
            queries={
                "{{reason}}": f"sum by (reason) (rate(baton_finished_choices_total{{$cluster, {OF_MODEL}}}"
                "[$__rate_interval]))"
            },
            is_stacked=True,
        ),
        Panel(
            title="Moderation verdicts",
            description="Verdicts per second of the function set in `router.moderation`. failed: it raised an error, "
            "or did not answer in time; the routers' logs give the reason.",
            unit="ops",
            queries={
                "{{verdict}}": "sum by (verdict) (rate(baton_moderation_verdicts_total{$cluster}[$__rate_interval])) "
                "or $zero"
            },
            is_stacked=True,
        ),
        Panel(
            title="Mean length",
            description="Mean tokens of a prompt and of a response. Longer prompts load prefill workers, longer "
            "responses decode workers.",
            unit="short",
            queries={"prompt": f"{PROMPTS} / ({BEGUN} > 0)", "response": f"{GENERATED} / ({ENDS} > 0)"},
            leads=(Lead("overview", "Prompt lengths, heat map"), Lead("overview", "Response lengths, heat map")),
        ),
        *(
            Panel(
                title=f"{what} lengths, heat map",
                description=f"Requests by the number of tokens of their {what.lower()}. A new band: a new kind of "
                f"client. {then}",
                unit="short",
                queries=heat(f"baton_request_{name}_tokens", f", {OF_MODEL}"),
                kind=Kind.HEAT,
                leads=(Lead("overview", "First tokens, heat map"),),
            )
            for what, name, then in (
                ("Prompt", "prompt", "Long prompts among short ones delay the short ones: add prefill workers."),
                ("Response", "generation", "Responses far above engine.output_reservation are preempted."),
            )
        ),
    ),
)
