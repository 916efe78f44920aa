"""The autoscaler: how many workers each pool should have, by what the cluster measures of itself.

    window         two states of the cluster -> what happened between them            pure
    policy         that, and the settings -> sizes of both pools, and why             pure
    autoscaler     observes, decides, orders; runs in the controller
    command        `baton autoscale`

`baton simulate --autoscale` runs the first two on workers in virtual time.
"""

__all__ = ["autoscaler", "command", "policy", "values", "window"]
