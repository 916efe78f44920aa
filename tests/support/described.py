"""What the OpenAPI document says of an answer, for tests that have the answer."""

from __future__ import annotations

from typing import Any

import jsonschema

from router.api.apis import document
from tools.api_docs import ROUTES


def check_described(path: str, answer: Any, method: str = "get") -> None:
    """Checks the JSON of an answer with status 200 against the document.

    Args:
        path: as the document has it, with the names of its parts.
    """
    whole = document(ROUTES)
    schema = whole["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": whole["components"]}, jsonschema.Draft202012Validator)
