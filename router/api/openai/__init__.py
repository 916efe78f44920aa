"""OpenAI's API as far as it is built: a file for each endpoint's body, one for the answers, one for the errors.

Bodies are validated here and become a `GenerateRequest`; what is not built is refused by name, never ignored.
"""

from router.api.openai.body import SloBody
from router.api.openai.description import OPENAI
from router.api.openai.endpoints import add_endpoints
from router.api.openai.errors import ERROR_NAME, ERROR_SCHEMA, error_body
from router.api.openai.structure import ResponseFormatBody, structure_of

__all__ = [
    "ERROR_NAME",
    "ERROR_SCHEMA",
    "OPENAI",
    "ResponseFormatBody",
    "SloBody",
    "add_endpoints",
    "error_body",
    "structure_of",
]
