"""The endpoint picker of the Gateway API inference extension: it chooses the router for each request of a gateway.

Gateways call it over Envoy's external processing (ext_proc). `pick` decides, `wire` reads and writes the messages,
`exchange` follows the stream of one HTTP request, and `service` is the server. docs/gateway.md describes its use.
"""

from router.picker.exchange import Sources
from router.picker.pick import Wanted
from router.picker.service import Picker
from router.picker.wire import Request

__all__ = ["Picker", "Request", "Sources", "Wanted"]
