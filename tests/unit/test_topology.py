"""The URLs of Sentinel and Redis Cluster are parsed."""

from __future__ import annotations

import pytest

from streamqd.config import mask_passwords, topology
from streamqd.config.endpoint import url_fault
from streamqd.config.secrets import has_password
from streamqd.config.topology import Address, Topology


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (
            "redis+sentinel://h1:26380,h2/shop/2",
            Topology("sentinel", False, (Address("h1", 26380), Address("h2", 26379)), "shop", 2),
        ),
        (
            "rediss+sentinel://me:p%40ss@[::1]:26379/my.master-1",
            Topology("sentinel", True, (Address("::1", 26379),), "my.master-1", 0, "me", "p@ss"),
        ),
        (
            "redis+cluster://h1:7000,h2:7001,h1:7000",
            Topology("cluster", False, (Address("h1", 7000), Address("h2", 7001))),
        ),
        (
            "rediss+cluster://:secret@10.0.0.1/0",
            Topology("cluster", True, (Address("10.0.0.1", 6379),), password="secret"),
        ),
        (
            "rediss://me:p%40ss@[::1]:7000/3",
            Topology("server", True, (Address("::1", 7000),), "", 3, "me", "p@ss"),
        ),
        ("redis://h?db=2", Topology("server", False, (Address("h", 6379),), db=2)),
        (
            "unix://:secret@/run/a%20b.sock?db=1",
            Topology("server", False, db=1, password="secret", path="/run/a b.sock"),
        ),
        ("embedded:", Topology("embedded:", False)),
    ],
)
def test_topology_url_is_parsed(url: str, found: Topology) -> None:
    assert topology.parse(url) == found
    assert url_fault(url) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+sentinel://", "has no host"),
        ("redis+sentinel://h:26379", "must contain the master"),
        ("redis+sentinel://h:26379/shop/first", "must contain the master"),
        ("redis+sentinel://h:x/shop", "invalid host or port"),
        ("redis+sentinel://h:0/shop", "invalid host or port"),
        ("redis+sentinel://h:65536/shop", "invalid host or port"),
        ("redis+sentinel://h,,i/shop", "invalid host or port"),
        ("redis+sentinel://[::1/shop", "invalid host or port"),
        ("redis+cluster://h:7000/1", "a database other than 0"),
        ("redis+cluster://h:7000?x=1", "parameters"),
        ("redis+cluster://h:7000#x", "parameters"),
        ("redis+cluster://me:s3cret/@h:7000", "invalid host or port"),
        ("rediss+cluster://me:s3cret@h:7000/nine", "a database other than 0"),
    ],
)
def test_invalid_topology_url_is_refused(url: str, said: str) -> None:
    fault = url_fault(url) or ""
    assert said in fault
    assert "s3cret" not in fault


def test_topology_is_printed_without_a_password() -> None:
    url = "redis+sentinel://me:s3cret@h1:1,h2:2/shop"
    assert str(topology.parse(url)) == "sentinel h1:1,h2:2 (shop)"
    assert mask_passwords(url) == "redis+sentinel://me:***@h1:1,h2:2/shop"
    assert has_password(url)
    assert str(topology.parse("redis+cluster://[::1]:7000")) == "cluster [::1]:7000"


def test_url_is_parsed_once_per_process_and_its_forks() -> None:
    assert topology.parse("redis://h:6379/3") is topology.parse("redis://h:6379/3")
