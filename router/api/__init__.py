"""The doors of the router: gRPC and HTTP over one service, the page, and orders passed on to the controller."""
