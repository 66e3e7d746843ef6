"""Each committed row is sent once if an outbox's relay dies or loses Redis or its database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamqd.store.client import connect
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support import databases, servers
from tests.support.outboxes import OutboxSite, Writers
from tests.support.servers import ProcessServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.fault("F39"), pytest.mark.timeout(200)]

WRITERS, TRANSACTIONS = 4, 60
FAULTS_AT = (0.2, 0.5, 0.8)  # shares of the transactions that are done when a fault strikes


@pytest.fixture
def database() -> Iterator[Any]:
    """Yield a PostgreSQL server for this test."""
    started = servers.require(databases.start, "postgresql")
    yield started
    started.close()


@pytest.fixture
def site(fresh_server: ProcessServer, database: Any, tmp_path: Path) -> Iterator[OutboxSite]:
    """Yield an outbox with two relays, one of them on standby."""
    link = connect(fresh_server.settings, timeout=60.0, name="test:outbox")
    with contextlib.closing(link):
        made = OutboxSite(tmp_path, fresh_server.url, Store(link, Keys()), database, batch=20)
        made.start(), made.start()
        made.wait_holder()
        yield made
        made.close()


def wait_finished(site: OutboxSite, writers: Writers) -> None:
    """Wait until all rows are sent, and compare the topic with the ledger."""
    writers.join()
    site.wait_empty(60)
    assert 0.7 < site.check() / (WRITERS * TRANSACTIONS) < 0.9
    assert "Traceback" not in site.logs()


def test_killed_relay_is_replaced_by_its_standby(site: OutboxSite) -> None:
    writers = Writers(site, WRITERS, TRANSACTIONS, pause=0.02)
    for share in FAULTS_AT:
        wait_until(lambda share=share: writers.share >= share, timeout=60)
        site.kill(site.wait_holder())
        site.start()
    wait_finished(site, writers)


def test_killed_server_gets_each_row_once(site: OutboxSite, fresh_server: ProcessServer) -> None:
    writers = Writers(site, WRITERS, TRANSACTIONS, pause=0.02)
    for share in FAULTS_AT:
        wait_until(lambda share=share: writers.share >= share, timeout=60)
        fresh_server.restart()
    wait_finished(site, writers)


def test_killed_database_keeps_its_rows(site: OutboxSite, database: Any) -> None:
    writers = Writers(site, WRITERS, TRANSACTIONS, pause=0.02)
    for share in FAULTS_AT:
        wait_until(lambda share=share: writers.share >= share, timeout=60)
        database.kill()
        database.start()
    wait_finished(site, writers)
