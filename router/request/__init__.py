"""A request as a whole: its model, its accounting, and its continuation after a broken stream.

`settlement` records a request exactly once, however it ended, with the tokens that `answer_tokens` counts. `resume`
continues it after a break, from this router's memory or from the journal of another router. `moderation` holds its
answers until the operator's judge allows them. `request_log` keeps the latest requests as `record` describes them, and
`bodies` records bodies that were refused before they became requests.
`usage_log` writes one usage record per request, over all of its calls. `usage_record` decides when, and `usage_marks`
is the state that routers share for it.
"""

__all__ = [
    "answer_tokens",
    "bodies",
    "model",
    "moderation",
    "record",
    "request_log",
    "resume",
    "settlement",
    "usage_log",
    "usage_marks",
    "usage_record",
]
