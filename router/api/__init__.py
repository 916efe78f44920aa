"""The router's interfaces: gRPC and HTTP over one service, the web page, and orders passed on to the controller.

Each turns its bytes into a `GenerateRequest` and the chunks back; `openai` has OpenAI's endpoints. Nothing here knows
workers.
"""

__all__ = ["controller_client", "exchange", "grpc_api", "http", "openai", "page"]
