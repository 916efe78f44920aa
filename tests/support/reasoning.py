"""The default model with another chat template: it reasons, and chats may begin inside of a reasoning."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if opens %}<think>
{% elif opens is false %}<think>

</think>

{% endif %}{% endif %}"""
"""With `opens`, true or false, answers begin inside of a reasoning, or behind one; else they may begin with one."""


def reasoning_model(folder: Path, default: Path, template: str = TEMPLATE) -> Path:
    """Makes a model in an empty folder, and returns the folder.

    Args:
        default: the folder of the default model, whose other files it shares.
        template: its chat template.
    """
    for path in default.iterdir():
        if path.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    config = json.loads((default / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
