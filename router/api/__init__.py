"""The router's interfaces: gRPC and HTTP over one service, the web page, and operators' orders.

Each interface turns bytes into a `GenerateRequest`, and chunks back into bytes. `openai`, `responses` and `anthropic`
have the endpoints of these APIs; the modules here are shared by the APIs of the HTTP port. `page` has the files of the
web page, and `operations` serves its data: only that module knows workers.
"""

__all__ = [
    "answering",
    "anthropic",
    "apis",
    "browsers",
    "connections",
    "delivery",
    "efforts",
    "exchange",
    "fields",
    "grpc_api",
    "http",
    "openai",
    "operations",
    "page",
    "parsing",
    "places",
    "responses",
    "routes",
    "sessions",
    "unserved",
]
