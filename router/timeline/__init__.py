"""What happened to a request: one timeline of events, and everything that is reported of it.

events         the events, and the timelines that collect them while a request runs
folds          pure functions of a timeline: stages, SLO outcome and blame, usage, timing, measured placements
sinks          metrics, span and usage record of an ended timeline
explain        a timeline in words, for `baton status --explain` and the web page
log            records the timelines of all requests, and keeps the latest
usage_log      writes one usage record for each request, over all of its calls; `usage_record` decides when, and
               `usage_marks` is the state that routers share for it
"""

__all__ = ["events", "explain", "folds", "log", "sinks", "usage_log", "usage_marks", "usage_record"]
