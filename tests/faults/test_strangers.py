"""Another client trims, moves or deletes data while the daemon uses it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.acceptance.test_redis_faults import wait_progress
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]
LOAD = 1000


def unread(daemon: Daemon, uids: list[str]) -> set[str]:
    """Return those of the given messages that the group has not read yet."""
    stream = daemon.keys.stream(TOPIC, 0)
    (group,) = daemon.link.execute("XINFO", "GROUPS", stream)
    last = dict(zip(group[::2], group[1::2], strict=True))[b"last-delivered-id"].decode()
    rows = daemon.link.execute("XRANGE", stream, f"({last}", "+")
    return {f"{TOPIC}/0/{row[0].decode()}" for row in rows} & set(uids)


@pytest.mark.fault("F25")
def test_trim_by_another_client_costs_only_its_entries(new_daemon: NewDaemon):
    """Fetched entries still run after a trim, and failures are settled with the worker's copy."""
    with new_daemon(consumer={"max_attempts": 1}) as daemon:
        daemon.send(["ok"] * 300)  # reads grow when handlers are quick
        daemon.wait_settled()
        uids: list[str] = []
        gone: set[str] = set()
        for _ in range(4):
            # A trim spares the entries that the worker holds, which are few on a slow machine.
            batch = range(LOAD // 4)
            uids += daemon.send("fail" if number % 10 == 3 else "sleep 0.004" for number in batch)
            wait_progress(daemon, 30)
            # The cut falls between two checks, so entries read in between are in the ledger.
            gone |= unread(daemon, uids)
            daemon.link.execute("XTRIM", daemon.keys.stream(TOPIC, 0), "MAXLEN", 0)
        more = daemon.send(["ok"] * 10)
        daemon.wait_settled()

        audit = daemon.ledger.audit(GROUP)
        dead = {letter["uid"] for letter in daemon.letters()}
        assert set(audit.lost) - dead <= gone
        assert set(more) <= daemon.ledger.finished_uids(GROUP)
        assert (audit.repeated, audit.unexpected) == ({}, [])
        failed = {each.uid for each in daemon.ledger.records("raise")}
        assert dead == failed, "each failure is a letter, with or without its entry"
        assert all(letter["payload"] == "fail" for letter in daemon.letters())
        assert daemon.events("worker.crashed") == daemon.events("lease.lost") == []
        assert daemon.stop() == 0


@pytest.mark.fault("F26")
def test_consumer_deleted_under_load_loses_no_message(new_daemon: NewDaemon, chance: random.Random):
    """The worker keeps its pending entries, although the server has forgotten them."""
    with new_daemon() as daemon:
        daemon.send("sleep 0.002" for _ in range(LOAD))
        deleted = 0
        for _ in range(8):
            wait_progress(daemon, chance.randrange(10, 60))
            stream = daemon.keys.stream(TOPIC, 0)
            deleted += daemon.link.execute("XGROUP", "DELCONSUMER", stream, GROUP, "w")
        daemon.wait_for(lambda: daemon.ledger.audit(GROUP) == Audit(), what="all have run once")
        daemon.wait_settled()
        print(f"pending entries that were deleted: {deleted}")
        assert deleted > 0
        assert daemon.events("worker.crashed") == daemon.events("lease.lost") == []
        assert daemon.stop() == 0


@pytest.mark.fault("F26")
@pytest.mark.parametrize("position", ["0", "$"])
def test_group_position_moved_under_load_is_respected(new_daemon: NewDaemon, position: str):
    """A lower position repeats entries, a higher one skips some, and no process crashes."""
    with new_daemon() as daemon:
        uids = daemon.send("sleep 0.002" for _ in range(LOAD))
        wait_progress(daemon, 100)
        missed = unread(daemon, uids) if position == "$" else set()
        daemon.link.execute("XGROUP", "SETID", daemon.keys.stream(TOPIC, 0), GROUP, position)
        more = daemon.send(["ok"] * 10)
        for uid in more:
            daemon.wait_run(uid, "end", timeout=30.0)
        daemon.wait_settled()
        audit = daemon.ledger.audit(GROUP)
        assert set(audit.lost) <= missed
        assert audit.unexpected == []
        assert set(audit.repeated.values()) <= {2}
        assert bool(audit.repeated) == (position == "0")
        assert daemon.events("worker.crashed") == daemon.events("lease.lost") == []
        assert daemon.letters() == []
        assert daemon.stop() == 0
