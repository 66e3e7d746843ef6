"""An outbox seen from outside: writers with transactions, relay processes, and its topic.

Each transaction of a writer inserts a message and a line of a ledger. The ledger therefore holds
exactly the committed messages, even if the answer to a commit was lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from streamqd import config
from streamqd.outbox.database import connect
from streamqd.outbox.outbox import Outbox
from streamqd.store import outbox as relays
from streamqd.store import topics
from streamqd.store.outbox import OutboxView
from streamqd.store.store import Store
from tests.support.daemon import toml
from tests.support.databases import DatabaseServer
from tests.support.forked_relay import ForkedRelay
from tests.support.waiting import wait_until

NAME, TOPIC = "shop", "orders"
KEYS = 3  # number of keys that each writer uses
sender = Outbox(settings=config.Settings())


Relay = subprocess.Popen[bytes] | ForkedRelay


class OutboxSite:
    """An outbox with its database, its topic, and the processes that relay it."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        store: Store,
        database: DatabaseServer,
        *,
        partitions: int = 2,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.store = store
        self.database = database
        self.url = database.new()
        with connect(self.url) as made:
            for statement in made.table.create():
                made.run(statement)
            made.run("CREATE TABLE ledger (writer integer, number integer)")
        self.config = folder / "outbox.toml"
        outbox = {"name": NAME, "database": self.url, "poll": "200ms", "lease_ttl": "1s"}
        self.config.write_text(
            toml(
                {
                    "redis": {"url": redis_url},
                    "log": {"format": "json"},
                    "outboxes": [{**outbox, **settings}],
                }
            )
        )
        topics.create(store, TOPIC, config.Topic(partitions=partitions))
        self.processes: list[Relay] = []
        self._numbers = itertools.count(1)

    # --- relays ---

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "streamqd", "--config", str(self.config), *arguments]

    def start(self) -> subprocess.Popen[bytes]:
        """Start another relay."""
        with (self.folder / f"relay-{next(self._numbers)}.log").open("wb") as log:
            made = subprocess.Popen(self.command("outbox", "run"), stdout=log, stderr=log)
        self.processes.append(made)
        return made

    def kill(self, process: Relay) -> None:
        process.kill()
        process.wait(10)
        self.processes.remove(process)

    def burst(self) -> None:
        """Relay the remaining rows, and exit."""
        done = subprocess.run(
            self.command("outbox", "run", "--burst"), capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()

    def view(self) -> OutboxView:
        [found] = relays.read_views(self.store, [NAME])
        return found

    def holder(self) -> Relay | None:
        """Return the process that currently holds the outbox."""
        view = self.view()
        for each in self.processes:
            if view.relayed and f"process {each.pid})" in view.owner:
                return each
        return None

    def wait_holder(self) -> Relay:
        wait_until(lambda: self.holder() is not None, timeout=20)
        found = self.holder()
        assert found is not None
        return found

    def logs(self) -> str:
        return "".join(each.read_text() for each in sorted(self.folder.glob("relay-*.log")))

    def close(self) -> None:
        for each in [*self.processes]:
            with contextlib.suppress(ProcessLookupError):
                each.send_signal(signal.SIGCONT)
            self.kill(each)

    # --- checks ---

    def ledger(self) -> set[tuple[int, int]]:
        with connect(self.url) as made:
            rows = made.rows("SELECT writer, number FROM ledger")
        return {(int(writer), int(number)) for writer, number in rows}

    def count_rows(self) -> int:
        with connect(self.url) as made:
            return made.measure_backlog(1_000_000)[0]

    def wait_empty(self, timeout: float, what: str = "") -> None:
        """Wait until no row is left, using one connection for all polls."""
        with connect(self.url) as made:
            wait_until(
                lambda: made.measure_backlog(1)[0] == 0, timeout=timeout, what=what, every=0.05
            )

    def entries(self) -> dict[int, list[tuple[bytes, int, int]]]:
        """Return the key, writer and number of each entry, by partition and in order."""
        found = {}
        for number in range(topics.partition_count(self.store, TOPIC) or 0):
            key = self.store.keys.stream(TOPIC, number)
            found[number] = []
            for _, flat in self.store.execute("XRANGE", key, "-", "+"):
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                writer, seq = map(int, fields[b"payload"].split(b":"))
                found[number].append((fields[b"key"], writer, seq))
        return found

    def check(self) -> int:
        """Assert that the topic holds each committed message once and in order. Return how many."""
        entries = self.entries()
        every = [(writer, number) for part in entries.values() for _, writer, number in part]
        assert len(every) == len(set(every)), "a row was sent twice"
        committed = self.ledger()
        assert set(every) == committed, (
            f"{len(committed - set(every))} rows are missing, {len(set(every) - committed)} never"
            " committed"
        )
        places: dict[bytes, list[list[int]]] = defaultdict(list)
        for part in entries.values():
            of_key: dict[bytes, list[int]] = defaultdict(list)
            for key, _, number in part:
                of_key[key].append(number)
            for key, numbers in of_key.items():
                places[key].append(numbers)
        for key, parts in places.items():
            # After the topic has grown, a key may have a second partition, whose messages are all
            # later.
            merged = [number for part in sorted(parts) for number in part]
            assert merged == sorted(merged), f"the order of {key!r} was not kept"
        return len(every)


class Writers:
    """Threads that each have a connection, and commit 80 % of their transactions."""

    def __init__(self, site: OutboxSite, count: int, transactions: int, pause: float) -> None:
        self._site = site
        self._transactions = transactions
        self._pause = pause
        self.done = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._write, args=(number,), name=f"writer-{number}")
            for number in range(count)
        ]
        for each in self._threads:
            each.start()

    @property
    def share(self) -> float:
        """The share of transactions that are finished."""
        return self.done / (self._transactions * len(self._threads))

    def join(self) -> None:
        for each in self._threads:
            each.join(120)
            assert not each.is_alive()

    def _write(self, writer: int) -> None:
        chance = random.Random(writer)
        connection: Any = None
        for number in range(self._transactions):
            while True:
                try:
                    if connection is None:
                        connection = self._site.database.connect(self._site.url)
                    self._transaction(connection, writer, number, chance)
                    break
                except Exception:  # noqa: BLE001 - the database restarts: its drivers raise many
                    with contextlib.suppress(Exception):
                        connection.close()
                    connection = None
                    if (writer, number) in self._committed():
                        break
                    time.sleep(0.05)
            with self._lock:
                self.done += 1
            if self._pause:
                time.sleep(self._pause)
        if connection is not None:
            connection.close()

    def _committed(self) -> set[tuple[int, int]]:
        while True:
            with contextlib.suppress(Exception):
                return self._site.ledger()
            time.sleep(0.05)

    def _transaction(
        self, connection: Any, writer: int, number: int, chance: random.Random
    ) -> None:
        cursor = connection.cursor()
        key = f"w{writer}-{number % KEYS}"
        sender.send(connection, TOPIC, f"{writer}:{number}".encode(), key=key)
        cursor.execute(f"INSERT INTO ledger VALUES ({writer}, {number})")
        if chance.random() < 0.2:
            connection.rollback()
        else:
            connection.commit()
        cursor.close()


def exit_after_commit(site: OutboxSite, values: int) -> None:
    """Commit in a separate process, which is killed immediately after the commit."""
    for number in range(values):
        pid = os.fork()
        if pid == 0:
            connection = site.database.connect(site.url)
            sender.send(connection, TOPIC, f"0:{number}".encode(), key="w0-0")
            connection.cursor().execute(f"INSERT INTO ledger VALUES (0, {number})")
            connection.commit()
            os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
