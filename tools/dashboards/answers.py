"""The section of the overview about answers: how they end, and how long they and their prompts are."""

from __future__ import annotations

from tools.dashboards.model import Kind, Lead, Panel, Section

GENERATED = 'sum(rate(baton_generation_tokens_total{$cluster, model=~"$model"}[$__rate_interval]))'
OF_MODEL = 'gen_ai_request_model=~"$model"'
PROMPTS = 'sum(rate(baton_prompt_tokens_total{$cluster, model=~"$model"}[$__rate_interval]))'
ENDS = 'sum(rate(baton_finished_choices_total{$cluster, model=~"$model"}[$__rate_interval]))'
BEGUN = f"sum(rate(gen_ai_server_time_to_first_token_seconds_count{{$cluster, {OF_MODEL}}}[$__rate_interval]))"


def heat(histogram: str, labels: str) -> dict[str, str]:
    """The numbers of values in each bucket."""
    return {"{{le}}": f"sum by (le) (increase({histogram}_bucket{{$cluster{labels}}}[$__rate_interval]))"}


SECTION = Section(
    "Answers",
    (
        Panel(
            title="Ends of answers",
            description="Answers a second by how they ended. stop: by an end-of-sequence token or a stop string; "
            "length: by their limit; tool_calls: after a call of a tool; content_filter: by the operator's "
            "moderation. If most end by length, clients set the limit low, or the model does not stop.",
            unit="ops",
            queries={
                "{{reason}}": 'sum by (reason) (rate(baton_finished_choices_total{$cluster, model=~"$model"}'
                "[$__rate_interval]))"
            },
            is_stacked=True,
        ),
        Panel(
            title="Verdicts of the moderation",
            description="Verdicts a second of the function that `router.moderation` names. failed: it raised, or did "
            "not answer in time; the routers' logs say why.",
            unit="ops",
            queries={
                "{{verdict}}": "sum by (verdict) (rate(baton_moderation_verdicts_total{$cluster}[$__rate_interval])) "
                "or $zero"
            },
            is_stacked=True,
        ),
        Panel(
            title="Mean length",
            description="Mean tokens of a prompt and of an answer. Longer prompts load prefill workers, longer "
            "answers decode workers.",
            unit="short",
            queries={"prompt": f"{PROMPTS} / ({BEGUN} > 0)", "answer": f"{GENERATED} / ({ENDS} > 0)"},
            leads=(Lead("overview", "Prompt lengths, heat map"), Lead("overview", "Answer lengths, heat map")),
        ),
        *(
            Panel(
                title=f"{what} lengths, heat map",
                description=f"Requests by the tokens of their {what.lower()}. A band that appears: a new kind of "
                f"client. "
                f"{then}",
                unit="short",
                queries=heat(f"baton_request_{name}_tokens", ', model=~"$model"'),
                kind=Kind.HEAT,
                leads=(Lead("overview", "First tokens, heat map"),),
            )
            for what, name, then in (
                ("Prompt", "prompt", "Long prompts among short ones make the short ones wait: more prefill workers."),
                ("Answer", "generation", "Answers far above engine.output_reservation are preempted."),
            )
        ),
    ),
)
