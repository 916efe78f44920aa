"""Anthropic's Messages API: bodies become the chats that all APIs share, and answers become blocks and typed events.

Bodies are validated here, at every depth. Features that are not supported are refused by name, never ignored.
"""

from router.api.anthropic.endpoints import add_endpoints
from router.api.anthropic.events import error_body

__all__ = ["add_endpoints", "error_body"]
