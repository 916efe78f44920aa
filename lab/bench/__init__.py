"""`baton bench`: a trace replayed against a running cluster, in real time, with the figures of `baton simulate`.

    trace      lab.traces, and the part that fits the model         command
    prompts    block ids -> token ids                                      prompts
    replay     an open loop: every request at its time                     replay, over connection
    report     what clients saw                                            report
    costs      of steps and transfers, for `baton simulate --costs`        fit

Everything is measured here, at the client, on one monotonic clock, and a request's time counts from when it was due.
"""

__all__ = ["command", "connection", "fit", "options", "prompts", "replay", "report"]
