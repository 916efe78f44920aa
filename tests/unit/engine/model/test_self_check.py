"""Parts of a model whose outputs the worker compares at its start."""

from __future__ import annotations

import torch

from engine.model.self_check import Parts


class Numbered(torch.nn.Linear):
    """A module that names its layer."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(4, 4)
        self.layer_idx = layer_idx


def test_a_module_that_names_a_layer_may_be_outside_of_the_list_of_layers() -> None:
    shared, layers = Numbered(0), torch.nn.ModuleList(torch.nn.Sequential(Numbered(number)) for number in range(2))
    model = torch.nn.ModuleDict({"shared": shared, "layers": layers})
    parts, values = Parts(model), torch.randn(1, 5, 4)
    with parts.recorded():
        once = [module(values) for module in (shared, *layers)]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with parts.given():
        again = [module(values) for module in (shared, *layers)]
    assert all(found.equal(expected) for found, expected in zip(again, once, strict=True))
