"""Which maps of a model adapters may change, as test passes show."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from baton.adapters import AdapterFacts, AdapterTarget
from engine.model.adapters import ModelAdapters


def test_a_pass_that_fails_does_not_forget_what_an_earlier_one_has_shown() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    adapters = ModelAdapters(model, 1, 8)
    adapters.num_tokens = 3
    with adapters.watched():
        model(torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="images"), adapters.watched():
        raise RuntimeError("the model cannot compute images")
    adapters.make()
    target = AdapterTarget(module="0", rank=2, num_in=4, num_out=4, scaling=1.0)
    adapters.require_fit(AdapterFacts(path="/a", digest="00", rank=2, targets=(target,), num_bytes=1))
