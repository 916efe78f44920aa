"""Client commands for a running cluster, over gRPC and HTTP.

adapters     `baton adapters`: LoRA adapters
client       client of a router's gRPC port
http_client  client of a router's HTTP port
answer       `baton generate`: a request and its streamed response
talk         `baton chat`: a chat over gRPC or HTTP
explain      `baton requests` and `baton status --explain`
orders       scale a pool, drain a worker, change a worker's role
scrape       reads the metrics of a router
tables       `baton status`
worker_log   log of a worker
trust        TLS options of client commands
watch        `baton status --watch`
"""

__all__ = [
    "adapters",
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
