"""OpenAI's Responses API as a stateless translation: items become a chat, and the chat's answer becomes items.

Bodies are validated here and become a `GenerateRequest`. One writer makes the events of an answer; the whole response
is assembled from them. Nothing is stored.
"""

from router.api.responses.endpoints import add_endpoints
from router.api.responses.tools import REFUSED_TOOLS

__all__ = ["REFUSED_TOOLS", "add_endpoints"]
