"""Fixtures that start a daemon for one test on the shared server, after emptying the server."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd.store.client import Connection
from tests.support.daemon import Daemon, daemons
from tests.support.servers import Server


@pytest.fixture
def new_daemon(server: Server, link: Connection, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Configure daemons: `new_daemon(partitions=2, consumer={"timeout": "1s"})`."""
    with daemons(tmp_path, server.url) as make:
        yield make


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """A random generator with a printed seed, which is always the same unless TEST_SEED is set."""
    seed = f"{os.environ.get('TEST_SEED', '1')} {request.node.name}"
    print(f"seed: {seed!r}")
    return random.Random(seed)
