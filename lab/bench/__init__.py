"""`baton bench`: replays a trace against a running cluster in real time, with the figures of `baton simulate`.

    trace      lab.traces, and the part that fits the model         command
    prompts    block ids -> token ids                                      prompts
    replay     an open loop: every request at its time                     replay, over connection
    report     clients' measurements                                       report
    costs      of steps and transfers, for `baton simulate --costs`        fit

Everything is measured at the client on one monotonic clock. A request's time counts from when it was due.
"""

__all__ = ["command", "connection", "fit", "options", "prompts", "replay", "report"]
