"""One request as a whole: the model it asks for, its books, and how it is continued after a break.

`settlement` books a request exactly once, however it ended; `resume` continues it after a break, from this router's
memory or from the journal of another router; `moderation` holds its answers until the operator's judge allows them.
"""

__all__ = ["model", "moderation", "resume", "settlement"]
