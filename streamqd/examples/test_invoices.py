"""Tests of the handler in invoices.py, both without a daemon and with a real daemon.

Run it: `pytest --pyargs streamqd.examples.test_invoices`, with pytest and the extras `embedded` and
`msgspec`: `pip install '.[embedded,msgspec]' pytest` in a clone of streamqd.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from streamqd import Producer
from streamqd.examples.invoices import write_invoice
from streamqd.pytest_plugin import RunDaemon
from streamqd.testing import assert_idempotent, run

ORDER = {"customer": "Ann", "lines": [{"article": "tea", "cents": 250, "count": 2}]}


def test_invoice_is_written(tmp_path: Path) -> None:
    """One run, including the module's `on_start`, which creates the directory."""
    result = run(write_invoice, ORDER, state_dir=tmp_path)

    assert result.verdict == "ack"
    assert [each.read_text() for each in tmp_path.glob("invoices/*")] == ["Ann: 5.00\n"]


def test_invalid_order_is_dead_lettered() -> None:
    """The handler is not called, so the test needs no directory."""
    result = run(write_invoice, {"customer": "Bob", "lines": 3})

    assert (result.verdict, result.reason) == ("dead", "undecodable")
    assert result.dead_letter is not None
    assert "$.lines" in result.dead_letter.error


def test_second_run_writes_the_same_invoice(tmp_path: Path) -> None:
    """A process can crash at any line, and the message then runs again."""
    folder = tmp_path / "invoices"

    def reset() -> None:
        shutil.rmtree(folder)
        folder.mkdir()

    assert_idempotent(
        write_invoice,
        ORDER,
        observe=lambda: {path.name: path.read_text() for path in folder.iterdir()},
        reset=reset,
        state_dir=tmp_path,
    )


def test_daemon_writes_the_invoice(streamqd_redis_url: str, streamqd_daemon: RunDaemon) -> None:
    """Run the real daemon on a private server until no messages are left."""
    with Producer(streamqd_redis_url) as producer:
        written = producer.send("orders", ORDER)

    finished = streamqd_daemon("streamqd.examples.invoices")

    invoice = finished.state_dir / f"invoices/{written.replace('/', '-')}.txt"
    assert invoice.read_text() == "Ann: 5.00\n"
