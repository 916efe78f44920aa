"""The default model with eyes that the arithmetic engine has: a token for images, and a template that writes it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

PLACEHOLDER, PLACEHOLDER_TEXT = 6, "<filename>"
"""A special token of the default model's tokenizer."""
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<filename>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\
{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OF_LISTS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<filename>' }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Takes lists only, as the template of SmolVLM."""
PNG = b"\x89PNG\r\n\x1a\n"


def model_with_eyes(folder: Path, default: Path, template: str = TEMPLATE) -> Path:
    """Makes a model in an empty folder, and returns the folder.

    Args:
        default: the folder of the default model, whose other files it shares.
    """
    for path in default.iterdir():
        if path.name not in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    config = json.loads((default / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": PLACEHOLDER}))
    config = json.loads((default / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def picture(name: str, num_tokens: int = 64, ending: bytes = b"") -> bytes:
    """What the arithmetic engine takes for an image of so many tokens; each name makes another one."""
    filling = (name.encode() + bytes(8 * num_tokens))[: 8 * num_tokens - len(PNG) - len(ending)]
    return PNG + filling + ending


def data_url(image: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"
