"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.contract.harness import Harness


@pytest.fixture
def harness(link: Connection, keys: Keys) -> Harness:
    """An assignment on an empty server."""
    return Harness(link, keys)


@pytest.fixture
def large_nodes(link: Connection) -> Iterator[int]:
    """Configure the server so that a stream node holds 2,500 entries of any size."""
    names = ("stream-node-max-entries", "stream-node-max-bytes")
    before = {name: link.execute("CONFIG", "GET", name)[1] for name in names}
    for name, value in zip(names, (2500, 0), strict=True):
        link.execute("CONFIG", "SET", name, value)
    yield 2500
    for name, value in before.items():
        link.execute("CONFIG", "SET", name, value)
