from __future__ import annotations

import ipaddress

import pytest

from baton.addresses import address_of, addresses_of, grpc_target, host_of, ip_address, is_address


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1:1", "10.0.0.1"),
        ("decode-0.pool_a.svc:65535", "decode-0.pool_a.svc"),
        ("[::1]:80", "::1"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0"),
    ],
)
def test_a_host_and_a_port_are_an_address(address: str, host: str) -> None:
    assert is_address(address)
    assert host_of(address) == host


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "h",
            ":1",
            "h:",
            "h:0",
            "h:01",
            "h:65536",
            "h:99999",
            "h:1:2",
            "::1:80",
            "[::1]",
            "[h]:1",
            "h:1\n",
            " h:1",
        ),
        *("unix:/run/x", "unix:run/x", "dns:h:1", "dns:///h:1", "ipv4:1.2.3.4:5", "ipv6:[::1]:2", "vsock:2:1", "h/x:1"),
        *("h:١", "é:1", "-h:1", "h" * 254 + ":1", "user@h:1", "h%2f:1"),
    ],
)
def test_nothing_else_is(address: str) -> None:
    assert not is_address(address)


def test_grpc_takes_every_address_for_a_name_and_a_port() -> None:
    """A host may have the name of one of its schemes."""
    assert is_address("unix:7")
    assert grpc_target("unix:7") == "dns:///unix:7"
    assert grpc_target("[fe80::1%eth0]:7") == "dns:///[fe80::1%25eth0]:7"


def test_one_host_has_many_spellings() -> None:
    here = ipaddress.ip_address("127.0.0.1")
    assert {ip_address(text) for text in ("127.0.0.1", "::1", "::ffff:127.0.0.1")} == {here}
    assert ip_address("fe80::1%eth0") == ip_address("fe80:0::1")
    assert addresses_of("[::1]") == addresses_of("127.0.0.1") == addresses_of("localhost") == {here}
    assert addresses_of("") == frozenset()
    with pytest.raises(OSError, match=r"[Nn]ame"):
        addresses_of("there.is.no.such.host.invalid")


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80"), ("[fd00::1]", "[fd00::1]:80"), ("::", "[::]:80")],
)
def test_an_ipv6_host_is_in_brackets(host: str, address: str) -> None:
    assert address_of(host, 80) == address
    assert host_of(address) == host.strip("[]")
