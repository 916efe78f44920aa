"""What an operator does with a running cluster, over gRPC and `/metrics`.

client   calls a router
orders   scale a pool, drain a worker, change a worker's role
scrape   reads the metrics of every process
trust    the options of clients for TLS
watch    `baton status --watch`
"""

__all__ = ["client", "orders", "scrape", "tables", "trust", "watch"]
