"""The router's interfaces: gRPC and HTTP over one service, the web page, and orders passed on to the controller.

Each turns its bytes into a `GenerateRequest` and the chunks back. `openai` and `anthropic` have the endpoints of
these APIs; what the APIs of the HTTP port share stands beside it. `page` has the files of the web page,
`operations` what it asks: only that knows workers.
"""

__all__ = [
    "answering",
    "anthropic",
    "apis",
    "connections",
    "controller_client",
    "delivery",
    "document",
    "exchange",
    "fields",
    "filling",
    "grpc_api",
    "handshake",
    "hosts",
    "http",
    "openai",
    "operations",
    "operators",
    "page",
    "parsing",
    "parts",
    "requests",
    "responses",
    "schemas",
    "several",
    "strict",
    "unions",
    "unserved",
]
