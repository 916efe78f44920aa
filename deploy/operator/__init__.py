"""What an operator does with a running cluster, over gRPC and `/metrics`.

client   calls a router
explain  `baton requests` and `baton status --explain`
orders   scale a pool, drain a worker, change a worker's role
scrape   reads the metrics of every process
trust    the options of clients for TLS
watch    `baton status --watch`
"""

__all__ = ["client", "explain", "orders", "scrape", "tables", "trust", "watch"]
