"""One request as a whole: the model it asks for, its books, and how it is continued after a break.

`settlement` books a request exactly once, however it ended, with the tokens that `answer_tokens` counts; `resume`
continues it after a break, from this router's memory or from the journal of another router; `moderation` holds its
answers until the operator's judge allows them. `request_log` remembers what became of requests, as `record` says;
`bodies` books what was refused before it was one.
`usage_log` writes what each request used, once over all of its calls: `usage_record` decides that, and `usage_marks` is
what routers know of it in common.
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
