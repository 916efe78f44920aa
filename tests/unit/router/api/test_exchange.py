"""How answers are written: JSON in ASCII, whatever is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api.exchange import JsonAnswer, event


@pytest.mark.parametrize(
    "value",
    [
        {"content": 'Grüße, \u2028 \u2029 \x85 \x1e "quoted" \U0001f600'},
        {"quoted": "half of a pair: \ud83d", "name\udc00": None},
        {"numbers": [0, -1, 2**63, 1e-7, 0.1, -1.5], "empty": {}, "tuple": (True, False)},
    ],
)
def test_any_value_is_one_line_of_ascii(value: dict[str, Any]) -> None:
    written = event(value, "some.name")
    assert written.isascii()
    name, data, *rest = written.decode().splitlines()
    assert (name, rest) == ("event: some.name", [""])
    assert data.startswith("data: ")
    assert json.loads(data.removeprefix("data: ")) == json.loads(json.dumps(value))
    assert event(value) == data.encode() + b"\n\n"
    assert JsonAnswer(value).body == data.removeprefix("data: ").encode()
