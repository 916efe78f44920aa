"""One request as a whole: the model it asks for, its books, and how it is continued after a break.

`settlement` books a request exactly once, however it ended; `resume` continues it after a break, from this router's
memory or from the journal of another router.
"""

__all__ = ["model", "resume", "settlement"]
