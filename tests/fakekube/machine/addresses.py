"""Loopback addresses: 127.A.B.C for pods, 127.(A+64).B.C for Services. No two machines have the same A.B."""

from __future__ import annotations

import random
import socket

KUBELET_PORT = 10250
FIRST, LAST = 2, 254


class Addresses:
    def __init__(self) -> None:
        rng = random.Random()
        while True:
            self._a, self._b = rng.randrange(64, 128), rng.randrange(256)
            self._claim = socket.socket()
            try:
                # Whoever listens here has these addresses.
                self._claim.bind((self.node, KUBELET_PORT))
                self._claim.listen()
            except OSError:
                self._claim.close()
            else:
                break
        self._num_pods = 0
        self._num_services = 0

    @property
    def node(self) -> str:
        return f"127.{self._a}.{self._b}.1"

    def for_pod(self, used: set[str]) -> str:
        """One that no pod has, as long ago as may be."""
        while True:
            self._num_pods += 1
            address = f"127.{self._a}.{self._b}.{_nth(self._num_pods)}"
            if address not in used:
                return address

    def for_service(self, used: set[str]) -> str:
        while True:
            self._num_services += 1
            address = f"127.{self._a + 64}.{self._b}.{_nth(self._num_services)}"
            if address not in used:
                return address

    def close(self) -> None:
        self._claim.close()


def _nth(number: int) -> int:
    return FIRST + (number - 1) % (LAST - FIRST + 1)
