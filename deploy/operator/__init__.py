"""What an operator does with a running cluster, over gRPC and HTTP.

client       calls a router
http_client    calls its HTTP port
answer       a request for `baton generate`, and its answer as it comes
talk         a chat, over either
explain      `baton requests` and `baton status --explain`
orders       scale a pool, drain a worker, change a worker's role
scrape       reads the metrics of every process
worker_log   what a worker has written
trust        the options of clients for TLS
watch        `baton status --watch`
"""

__all__ = [
    "answer",
    "client",
    "explain",
    "http_client",
    "orders",
    "scrape",
    "tables",
    "talk",
    "trust",
    "watch",
    "worker_log",
]
