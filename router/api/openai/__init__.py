"""OpenAI's API as far as it is built: a file for each endpoint's body, one for the answers, one for the errors.

Bodies are validated here and become a `GenerateRequest`; what is not built is refused by name, never ignored.
"""

from router.api.openai.answers import ChoiceAnswer, Shape
from router.api.openai.body import Body, SloBody
from router.api.openai.chat import ChatBody, chat_of
from router.api.openai.completions import CompletionBody
from router.api.openai.errors import error_body
from router.api.openai.tokens import DetokenizeBody, TokenizeBody

__all__ = [
    "Body",
    "ChatBody",
    "ChoiceAnswer",
    "CompletionBody",
    "DetokenizeBody",
    "Shape",
    "SloBody",
    "TokenizeBody",
    "chat_of",
    "error_body",
]
