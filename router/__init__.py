"""The router: text in, text out, over pools of workers. It never imports torch.

api         gRPC, HTTP, OpenAI's API, the web page
models      the models of the router: names, shares, announcements, files
process.py  `python -m router`: settings, signals, the event loop
service.py  the life of a request, in order
picker      choice of a router for each request of a gateway
request     state of a whole request: journal and resuming, moderation
timeline    what happened to a request, and everything that is reported of it
admission   tenants, validation, limits, deadlines
prompt      chat template and tokenizer
placement   choice of workers: a pure policy over a view of the pools
serve       the life of a choice on the workers: a pure state machine, and a driver that carries it out
answer      detokenization and stop strings
cluster     state of the other processes
"""

__all__ = [
    "admission",
    "answer",
    "api",
    "cluster",
    "models",
    "picker",
    "placement",
    "process",
    "prompt",
    "request",
    "serve",
    "server",
    "service",
    "timeline",
]
