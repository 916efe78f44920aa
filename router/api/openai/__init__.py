"""The supported part of OpenAI's completions API: a file for each endpoint's body, one for answers, one for errors.

Bodies are validated here and become a `GenerateRequest`. Features that are not supported are refused by name, never
ignored.
"""

from router.api.openai.answers import error_body
from router.api.openai.body import ResponseFormatBody, SloBody, structure_of
from router.api.openai.endpoints import add_endpoints

__all__ = [
    "ResponseFormatBody",
    "SloBody",
    "add_endpoints",
    "error_body",
    "structure_of",
]
