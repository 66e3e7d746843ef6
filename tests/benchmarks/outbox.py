"""Compare the relay of an outbox with a bare loop, in one run: `make bench NAME=outbox`.

The bare loop reads 512 rows with SELECT … FOR UPDATE SKIP LOCKED (SQLite: BEGIN IMMEDIATE), adds
their keys and payloads with a pipeline of XADD, deletes the rows and commits. It routes nothing and
records nothing, and sends rows twice if it is killed before its commit. Both use the same database,
server and rows, in turns. Compare the ratios. The clock starts before the connections are opened,
and stops when the table is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from streamqd import config
from streamqd.outbox.database import Database, connect
from streamqd.outbox.outbox import Outbox
from streamqd.outbox.relay import Relay
from streamqd.store import topics
from streamqd.store.client import connect as connect_redis
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.benchmarks.bars import Bar, print_bars
from tests.benchmarks.quick import PAYLOAD, server
from tests.support import databases
from tests.support.databases import DatabaseServer
from tests.support.machine import machine
from tests.support.servers import NoServerError

TOPIC = "bench"
BATCH = 512
LEAST = 0.6  # the required ratio to the bare loop


def main() -> None:
    """Measure both several times on each database, in turns, and print medians."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=100_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--partitions", type=int, default=4)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    report: dict[str, Any] = {"machine": machine(), "rows": options.rows, "rows per second": {}}
    bars = []
    for dialect in databases.DIALECTS:
        try:
            started = databases.start(dialect)
        except NoServerError as error:
            print(f"{dialect} is left out: {error}")
            continue
        with contextlib.closing(started), server(aof=False) as path:
            found = _compare(started, path, options)
        report["rows per second"][dialect] = found
        bars.append(Bar(f"relay, of a bare loop on {dialect}", found["ratio"], LEAST))
    print(json.dumps(report, indent=2))
    report["bars"] = print_bars(bars)
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def _compare(database: DatabaseServer, path: str, options: argparse.Namespace) -> dict[str, float]:
    rates: dict[str, list[float]] = {"relay": [], "bare loop": []}
    costs: dict[str, list[float]] = {"relay": [], "bare loop": []}
    settings = config.Redis(url=f"unix://{path}")
    with _store(settings) as store:
        topics.create(store, TOPIC, config.Topic(partitions=options.partitions))
        url = database.new()
        with connect(url) as link:
            for statement in link.table.create():
                link.run(statement)
        ways: dict[str, Callable[[], None]] = {
            "relay": lambda: _run_relay(url, settings),
            "bare loop": lambda: _run_bare_loop(database, url, path),
        }
        for _ in range(options.rounds):
            for name, way in ways.items():
                _fill(database, url, options.rows)
                began, used = time.perf_counter(), time.process_time()
                way()
                rates[name].append(options.rows / (time.perf_counter() - began))
                costs[name].append((time.process_time() - used) / options.rows)
                _check_written(store, url, name, options)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratio = medians["relay"] / medians["bare loop"]
    return {
        **{name: round(rate) for name, rate in medians.items()},
        "ratio": round(ratio, 2),
        # CPU of this process alone, so that the load of the machine matters less.
        **{
            f"{name}, CPU us per row": round(statistics.median(found) * 1e6, 1)
            for name, found in costs.items()
        },
    }


@contextlib.contextmanager
def _store(settings: config.Redis) -> Iterator[Store]:
    link = connect_redis(settings, timeout=30.0, name="bench:outbox")
    yield Store(link, Keys())
    link.close()


def _fill(database: DatabaseServer, url: str, rows: int) -> None:
    outbox = Outbox(settings=config.Settings())
    with contextlib.closing(database.connect(url)) as application:
        for number in range(rows):
            outbox.send(application, TOPIC, PAYLOAD, key=b"k%d" % (number % 1000))
        application.commit()


def _check_written(store: Store, url: str, name: str, options: argparse.Namespace) -> None:
    """Assert that all rows were written, and empty the streams."""
    keys = [store.keys.stream(TOPIC, number) for number in range(options.partitions)]
    lengths = store.pipeline([("XLEN", key) for key in keys])
    assert sum(lengths) == options.rows, f"{name}: {lengths}"
    store.execute("DEL", *keys)
    with connect(url) as link:
        assert link.measure_backlog(1)[0] == 0


def _run_relay(url: str, settings: config.Redis) -> None:
    reader, writer = os.pipe()
    with _store(settings) as store:
        relay = Relay(
            config.OutboxSettings("bench", url, batch=BATCH),
            config.Settings(redis=settings),
            Database(url, "streamqd_outbox", None, 1 << 20, create=False),
            store,
            stop_fd=reader,
            stopping=lambda: False,
        )
        relay.run(burst=True)
    os.close(reader)
    os.close(writer)


def _run_bare_loop(database: DatabaseServer, url: str, path: str) -> None:
    client: Any = redis.Redis(unix_socket_path=path)
    lite = database.dialect == "sqlite"
    marker = "?" if lite else "%s"
    locked = "" if lite else " FOR UPDATE SKIP LOCKED"
    column = "`key`" if database.dialect == "mysql" else '"key"'
    query = f"SELECT id, payload, {column} FROM streamqd_outbox ORDER BY id LIMIT {BATCH}{locked}"
    stream = Keys().stream(TOPIC, 0)
    with contextlib.closing(client), contextlib.closing(database.connect(url)) as connection:
        cursor = connection.cursor()
        while True:
            if lite:
                cursor.execute("BEGIN IMMEDIATE")
            cursor.execute(query)
            rows = cursor.fetchall()
            if not rows:
                connection.rollback()
                return
            pipeline = client.pipeline(transaction=False)
            for _, payload, key in rows:
                pipeline.execute_command("XADD", stream, "*", "payload", payload, "key", key)
            pipeline.execute()
            markers = ", ".join([marker] * len(rows))
            ids = [row[0] for row in rows]
            cursor.execute(f"DELETE FROM streamqd_outbox WHERE id IN ({markers})", ids)
            connection.commit()


if __name__ == "__main__":
    main()
