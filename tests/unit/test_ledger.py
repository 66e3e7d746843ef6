"""The ledger must detect lost, repeated and unexpected messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.ledger import Audit, Ledger


class Run(NamedTuple):
    uid: str
    group: str = "g"
    attempt: int = 1


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_ledger_accepts_one_run_per_message(ledger: Ledger):
    for uid in ("a", "b"):
        ledger.record_sent(uid, "text")
        with ledger.run(Run(uid)):
            pass

    assert ledger.audit("g") == Audit()
    assert [(each.kind, each.uid) for each in ledger.records("start", "end")] == [
        ("start", "a"),
        ("end", "a"),
        ("start", "b"),
        ("end", "b"),
    ]


def test_ledger_finds_a_message_without_a_success(ledger: Ledger):
    for uid in ("never", "raised", "other"):
        ledger.record_sent(uid, "text")
    with pytest.raises(ValueError, match="no"), ledger.run(Run("raised")):
        raise ValueError("no")
    with ledger.run(Run("other", group="another")):
        pass

    assert ledger.audit("g") == Audit(lost=["never", "other", "raised"])


def test_ledger_finds_repeated_and_unexpected_runs(ledger: Ledger):
    ledger.record_sent("a", "text")
    for uid in ("a", "a", "b"):
        with ledger.run(Run(uid)):
            pass

    assert ledger.audit("g") == Audit(repeated={"a": 2}, unexpected=["b"])


def test_ledger_keeps_records_of_a_killed_process(ledger: Ledger):
    pid = os.fork()
    if not pid:
        with ledger.run(Run("a")):
            os._exit(9)
    os.waitpid(pid, 0)

    (record,) = ledger.records()
    assert (record.kind, record.uid, record.pid) == ("start", "a", pid)


def test_ledger_reads_an_unfinished_record_later(ledger: Ledger):
    ledger.record_sent("a", "text")
    whole = ledger.path.read_bytes()
    with ledger.path.open("ab") as file:
        file.write(whole[:5])
        file.flush()
        assert len(ledger.records()) == 1
        file.write(whole[5:])
    assert len(ledger.records()) == 2


def test_ledger_skips_a_torn_record(ledger: Ledger):
    ledger.record_sent("a", "1")
    with ledger.path.open("ab") as file:
        file.write(ledger.path.read_bytes()[:9])
    ledger.record_sent("b", "2")

    assert [each.uid for each in ledger.records()] == ["a", "b"]
