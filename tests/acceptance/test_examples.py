"""The example modules behave in a real daemon as their pages describe."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from streamqd.config import load
from streamqd.producer import Producer
from tests.support.daemon import Daemon


def test_every_example_handles_its_messages(new_daemon: Callable[..., Daemon]):
    daemon = new_daemon(groups=[])
    names = ("lookup", "readings", "invoices")
    daemon.write_config(
        topics={},
        daemon=daemon.tables["daemon"]
        | {"handlers": [f"streamqd.examples.{name}" for name in names], "state_dir": "state"},
    )
    state = daemon.folder / "state"
    with daemon, Producer(settings=load(daemon.config_path)) as producer:
        address = producer.send("lookups", "127.0.0.1")
        for reading in ("1.5", "warm", "2.5"):
            producer.send("sensors", reading)
        order = b'{"customer": "Ann", "lines": [{"article": "tea", "cents": 250, "count": 2}]}'
        written = producer.send("orders", order)
        producer.send("orders", b'{"customer": "Bob", "lines": 3}')

        def letters(topic: str) -> dict[bytes, bytes]:
            found = daemon.link.execute("XRANGE", daemon.keys.dlq(topic, 0), "-", "+")
            return {
                fields[fields.index(b"payload") + 1]: fields[fields.index(b"reason") + 1]
                for _, fields in found
            }

        daemon.wait_for(
            lambda: (state / f"lookups/{address.replace('/', '-')}").exists(), what="a name"
        )
        daemon.wait_for(lambda: letters("sensors"), what="a letter")
        daemon.wait_for(lambda: letters("orders"), what="a letter")
        assert letters("sensors") == {b"warm": b"dead"}
        assert letters("orders") == {b'{"customer": "Bob", "lines": 3}': b"undecodable"}
        invoice = state / f"invoices/{written.replace('/', '-')}.txt"
        assert invoice.read_text() == "Ann: 5.00\n"
        assert daemon.stop() == 0
    with sqlite3.connect(state / "readings-0.db") as database:
        assert database.execute("SELECT value FROM readings ORDER BY value").fetchall() == [
            (1.5,),
            (2.5,),
        ]
    database.close()
