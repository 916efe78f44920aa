"""OpenAI's API as far as it is built: a file for each endpoint's body, one for the answers, one for the errors.

Bodies are validated here and become a `GenerateRequest`; what is not built is refused by name, never ignored.
"""

from router.api.openai.endpoints import OPENAPI_PATH, add_endpoints
from router.api.openai.errors import error_body

__all__ = ["OPENAPI_PATH", "add_endpoints", "error_body"]
