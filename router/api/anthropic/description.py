"""Description of the served part of Anthropic's API."""

from __future__ import annotations

from router.api.anthropic.body import CountTokensBody, MessageBody
from router.api.anthropic.errors import ERROR_NAME, ERROR_SCHEMA
from router.api.document import Api, Endpoint

ANTHROPIC = Api(
    endpoints={
        "/v1/messages": Endpoint(body=MessageBody, is_streamed=True),
        "/v1/messages/count_tokens": Endpoint(body=CountTokensBody),
    },
    error_name=ERROR_NAME,
    error=ERROR_SCHEMA,
)
