"""`baton bench`: a trace replayed against a running cluster, in real time, told in the figures of `baton simulate`.

    trace      deploy.lab.traces, and what of it the served model takes    command
    prompts    block ids -> token ids                                      prompts
    replay     an open loop: every request at its time                     replay, over connection
    report     what clients saw                                            report
    costs      what it cost there, for `baton simulate --costs`            fit

Everything is measured here, at the client, on one monotonic clock, and a request's time counts from when it was due.
"""
