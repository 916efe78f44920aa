"""Description of the served parts of OpenAI's API and of vLLM's."""

from __future__ import annotations

from router.api.document import Api, Endpoint
from router.api.openai.chat import ChatBody
from router.api.openai.completions import CompletionBody
from router.api.openai.errors import ERROR_NAME, ERROR_SCHEMA
from router.api.openai.fields import REFUSED, WITHOUT_EFFECT
from router.api.openai.tokens import DetokenizeBody, TokenizeBody

OPENAI = Api(
    endpoints={
        "/v1/chat/completions": Endpoint(
            body=ChatBody, is_streamed=True, refused=REFUSED, without_effect=WITHOUT_EFFECT
        ),
        "/v1/completions": Endpoint(
            body=CompletionBody, is_streamed=True, refused=REFUSED, without_effect=WITHOUT_EFFECT
        ),
        "/tokenize": Endpoint(body=TokenizeBody),
        "/detokenize": Endpoint(body=DetokenizeBody),
    },
    read={
        "/v1/models": "Lists the served model.",
        "/v1/models/{model}": "Describes a model.",
        "/tokenizer_info": "Describes the tokenizer: its tokenizer_config.json, and the chat template in use.",
    },
    error_name=ERROR_NAME,
    error=ERROR_SCHEMA,
)
