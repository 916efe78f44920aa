"""A request as a whole: its model, moderation, and its continuation after a broken stream.

`resume` continues a request after a break, from this router's memory or from the journal of another router.
`moderation` holds its answers until the operator's judge allows them.
"""

__all__ = ["model", "moderation", "resume"]
