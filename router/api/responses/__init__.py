"""OpenAI's Responses API, as a stateless translation: its items become a chat, and the chat's answer becomes items.

Bodies are validated here and become a `GenerateRequest`; one writer makes the events of an answer, and the whole answer
is what they add up to. Nothing is stored.
"""

from router.api.responses.description import RESPONSES
from router.api.responses.endpoints import add_endpoints
from router.api.responses.tools import REFUSED_TOOLS

__all__ = ["REFUSED_TOOLS", "RESPONSES", "add_endpoints"]
