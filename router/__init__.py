"""The router: text in, text out, over pools of workers. It never imports torch.

api         gRPC, HTTP, OpenAI's bodies, the page
process.py  `python -m router`: settings, signals, the loop
service.py  the life of a request, in order
request     one request as a whole: sequence, books, resuming
admission   who is admitted: tenants, validation, limits, deadlines
prompt      chat template and tokenizer
placement   which workers: a pure policy over a view of the pools
dispatch    the calls to workers, and what happens when one fails
answer      detokenization and stop strings
cluster     the picture of the other processes
"""

__all__ = [
    "admission",
    "answer",
    "api",
    "cluster",
    "dispatch",
    "http_server",
    "placement",
    "process",
    "prompt",
    "request",
    "server",
    "service",
    "slo",
]
