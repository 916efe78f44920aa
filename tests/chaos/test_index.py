"""The index under attack: hints are right again within seconds, and neither a wrong token nor a failure is seen.

Three routers share one Redis. Conversations go round the routers, so what a router knows of a worker's cache it has
from the index, and the pools are too small for all of them, so that a router which misses an eviction is caught.
"""

from __future__ import annotations
