"""Description of the served part of the Responses API."""

from __future__ import annotations

from router.api.document import Api, Endpoint
from router.api.openai import ERROR_NAME, ERROR_SCHEMA
from router.api.responses.body import InputBody, ResponsesBody
from router.api.responses.endpoints import COUNT_PATH, PATH
from router.api.responses.fields import REFUSED, REFUSED_OF_INPUT, WITHOUT_EFFECT

RESPONSES = Api(
    endpoints={
        PATH: Endpoint(body=ResponsesBody, is_streamed=True, refused=REFUSED, without_effect=WITHOUT_EFFECT),
        COUNT_PATH: Endpoint(body=InputBody, refused=REFUSED_OF_INPUT, without_effect=InputBody.without_effect),
    },
    error_name=ERROR_NAME,
    error=ERROR_SCHEMA,
)
