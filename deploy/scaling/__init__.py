"""The autoscaler: computes the size of each pool from the cluster's measurements.

    window         two states of the cluster -> measurements of the time between      pure
    policy         measurements and settings -> sizes of both pools, with reasons     pure
    idleness       states of the cluster -> time without a request                    pure
    autoscaler     observes, decides, scales; runs in the controller
    command        `baton autoscale`

`baton simulate --autoscale` runs the first two on workers in virtual time.
"""

__all__ = ["autoscaler", "command", "idleness", "policy", "values", "window"]
