"""A server's clock jumps, its last writes are lost, or it refuses to write."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamqd.store.client import Connection
from tests.acceptance.test_redis_faults import (
    assert_nothing_moved,
    pause_server,
    run_pair,
    wait_clock,
    wait_progress,
)
from tests.support.clock import HOUR, Clock, seconds_ahead
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.kill_matrix import freeze
from tests.support.ledger import Audit
from tests.support.servers import ProcessServer

Make = Callable[..., Daemon]
TTL = 1.0


# --- its clock ------------------------------------------------------------------------------------


@pytest.mark.fault("F10")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_clock_jump_loses_and_moves_nothing(make: Make, fresh_server: ProcessServer, jump: int):
    """A jump forward expires all leases and members, and a jump back extends them by an hour.

    No instance takes over a partition from another, because it has seen the other's heartbeats.
    """
    clock = Clock(fresh_server)
    with run_pair(make, 2 * TTL) as (first, second):
        first.send("sleep 0.004" for _ in range(1200))
        wait_progress(first, 100)

        before = first.epochs()
        clock.jump_to(jump)
        jumped_at = time.monotonic()
        first.wait_for(
            lambda: abs(seconds_ahead(first.link) - jump) < 60, what="the server notices the jump"
        )
        wait_clock(first, jumped_at, 3 * TTL)
        later = first.send(["ok"] * 8)
        first.wait_settled(40.0)

        audit = first.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert set(later) <= first.ledger.finished_uids(GROUP)
        assert first.epochs() == before
        assert audit.repeated == {}
        assert first.stop() == second.stop() == 0


@pytest.mark.promise
@pytest.mark.fault("F10")
def test_lost_owner_is_replaced_after_a_clock_step_back(make: Make, fresh_server: ProcessServer):
    """A lost owner is replaced, although its leases and heartbeat seem valid for an hour more."""
    clock = Clock(fresh_server)
    with run_pair(make, 2 * TTL) as (first, second):
        first.send(["ok"] * 20)
        first.wait_settled()
        before = first.epochs()
        freeze(first)  # to all others it is dead, and it renews nothing from here on
        clock.jump_to(-HOUR)
        later = second.send(["ok"] * 20)
        killed_at = time.monotonic()
        first.kill()
        second.wait_settled(20 * TTL)
        print(f"taken over within {time.monotonic() - killed_at:.1f} s, ttl {2 * TTL:g} s")

        assert set(later) <= second.ledger.finished_uids(GROUP)
        after = second.epochs()
        assert {number for number in before if after[number] != before[number]}
        assert all(after[number] >= before[number] for number in before)
        assert second.stop() == 0


@pytest.mark.fault("F10", "F32")
def test_instance_killed_before_a_clock_step_is_not_a_duplicate(
    make: Make, fresh_server: ProcessServer
):
    """An old run is not taken for a duplicate, even if no lock on the host proves it dead."""
    clock = Clock(fresh_server)
    settings = {"instance": "same", "lease_ttl": f"{TTL}s"}
    with make(name="east", daemon=settings) as first:
        first.send(["ok"] * 20)
        first.wait_settled()
        first.kill()
        first.wait_gone(2.0)
    clock.jump_to(-HOUR)
    second = make(name="west", daemon={**settings, "state_dir": "elsewhere"})
    with second:
        second.send(["ok"] * 20)
        second.wait_settled()
        assert second.events("duplicate_instance.exited") == []
        assert second.stop() == 0


@pytest.mark.fault("F10")
def test_retry_is_due_by_the_clock_of_the_server(make: Make, fresh_server: ProcessServer):
    clock = Clock(fresh_server)
    backoff = {"kind": "fixed", "base": "1h", "max": "1h", "jitter": "none"}
    with make(consumer={"backoff": backoff, "max_attempts": 2}) as daemon:
        (uid,) = daemon.send(["fail"])
        daemon.wait_run(uid, "raise")
        daemon.wait_for(lambda: daemon.pending() == 0, what="it waits for its second attempt")
        clock.jump_to(HOUR - 60)
        daemon.send(["ok"])
        daemon.wait_for(
            lambda: len(daemon.ledger.finished_uids(GROUP)) == 1, what="the other is done"
        )
        assert len(daemon.ledger.records_for(uid, "start")) == 1, "it is not due yet"
        clock.jump_to(HOUR + 60)
        daemon.wait_run(uid, "raise", count=2)
        daemon.wait_settled()
        assert [each["uid"] for each in daemon.letters()] == [uid]


# --- it hangs -------------------------------------------------------------------------------------


@pytest.mark.fault("F9")
def test_paused_server_moves_none_of_many_partitions(make: Make, fresh_server: ProcessServer):
    """All leases expire together, but no instance takes one over, and there is no stampede."""
    with run_pair(make, 2 * TTL, 32) as (first, second):
        first.send(["ok"] * 64)
        first.wait_settled()
        epochs = first.epochs()
        marks = pause_server(fresh_server, 4 * TTL, first, second)
        first.send(["ok"] * 64)
        first.wait_settled(40.0)
        assert first.epochs() == epochs
        assert_nothing_moved(marks)
        # An instance sends its renewals together. If that packet was already in the server's
        # socket, it was executed after the pause and its answer was lost. In that case, no renewal
        # is late.
        late = sum(len(daemon.events("lease.renewed_late", mark)) for daemon, mark in marks.items())
        print(f"renewed late: {late} of 32 leases")
        assert first.ledger.audit(GROUP) == Audit()
        assert first.stop() == second.stop() == 0


# --- lost writes ----------------------------------------------------------------------------------


@pytest.mark.fault("F14")
def test_lost_file_tail_repeats_and_loses_only_its_content(make: Make, fresh_server: ProcessServer):
    """After a power loss, the file ends at its last sync. Only later writes are lost."""
    folder, copy = fresh_server.folder, fresh_server.folder / "copy"
    files = ("appendonlydir", "appendonly.aof")
    with make(partitions=2, daemon={"lease_ttl": "2s"}) as daemon:
        before = daemon.send("sleep 0.003" for _ in range(1000))
        wait_progress(daemon, 150)
        copy.mkdir()
        for name in files:
            if (folder / name).is_dir():
                shutil.copytree(folder / name, copy / name)
            elif (folder / name).exists():
                shutil.copy(folder / name, copy / name)
        written = time.monotonic()
        # The server will lose this new token and epoch.
        os.kill(daemon.pids()[1], 9)
        charged = daemon.wait_event("worker.crashed").get("charged")
        daemon.wait_event("worker.ready", after=daemon.events("worker.crashed")[0]["number"])
        tail = daemon.send(["ok"] * 50)
        wait_progress(daemon, 150)
        epochs = daemon.epochs()
        fresh_server.kill()
        for name in files:
            if (copy / name).is_dir():
                shutil.rmtree(folder / name)
                shutil.copytree(copy / name, folder / name)
            elif (copy / name).exists():
                shutil.copy(copy / name, folder / name)
        fresh_server.restart()

        daemon.wait_settled(40.0)
        again = daemon.send(["ok"] * 4)
        for uid in again:
            daemon.wait_run(uid, "end")
        daemon.wait_settled()

        audit = daemon.ledger.audit(GROUP)
        assert audit.unexpected == []
        assert set(audit.lost) <= set(tail), "only messages of the lost tail"
        last = {
            uid: daemon.ledger.records_for(uid, "end")[0].at
            for uid in audit.repeated
            if uid in before
        }
        # Runs that finished just before the copy may have been acknowledged after it.
        own = f"{TOPIC}/1/{charged.removeprefix('m:')}" if charged else ""
        early = [uid for uid, at in last.items() if at < written - 0.5 and uid != own]
        assert early == [], "acknowledged before the tail, and run again"
        assert daemon.epochs()[1] > epochs[1], "greater than those that the server has forgotten"
        print(f"lost: {len(audit.lost)}, repeated: {len(audit.repeated)}")
        assert daemon.stop() == 0


# --- it refuses to write --------------------------------------------------------------------------


def settle_after(daemon: Daemon, refuse: Callable[[], None], accept: Callable[[], None]) -> None:
    """Run a message while the server starts to refuse writes, for longer than a lease TTL."""
    pids, epochs = daemon.pids(), daemon.epochs()
    (running,) = daemon.send(["await go"], partition=0)
    daemon.send(["ok"] * 20, partition=0)
    daemon.wait_run(running)
    mark = daemon.mark()
    refuse()
    refused_at = time.monotonic()
    (daemon.folder / "go").touch()
    daemon.wait_run(running, "end")
    wait_clock(daemon, refused_at, 2 * TTL)
    started = daemon.ledger.count("start")
    wait_clock(daemon, refused_at, 3 * TTL)
    assert daemon.ledger.count("start") <= started + 1, "it continues to read"
    accept()
    daemon.wait_settled(40.0)
    daemon.send(["ok"] * 4)
    daemon.wait_settled()
    assert daemon.ledger.audit(GROUP) == Audit()
    assert daemon.pids() == pids
    assert daemon.epochs() == epochs
    for name in ("lease.lost", "lease.acquired", "worker.crashed"):
        assert daemon.events(name, mark) == []
    assert daemon.stop() == 0


@pytest.mark.fault("F22")
def test_missing_replicas_delay_but_repeat_no_message(make: Make):
    with make(partitions=2, daemon={"lease_ttl": f"{TTL}s"}) as daemon:

        def replicas(count: int) -> None:
            daemon.link.execute("CONFIG", "SET", "min-replicas-to-write", count)

        settle_after(daemon, lambda: replicas(1), lambda: replicas(0))


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Mount a file system of one mebibyte."""
    folder = Path(__file__).parent / f".disk-{os.getpid()}"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a file system cannot be mounted: not root, or in a container without rights")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


@pytest.mark.fault("F22")
def test_full_disk_delays_messages_but_repeats_none(binary: Path, small_disk: Path, tmp_path: Path):
    server = ProcessServer(
        "small-disk", binary, aof=True, dir=str(small_disk), appendfsync="everysec"
    )
    ballast = small_disk / "ballast"
    daemon = Daemon(tmp_path, server.url, partitions=2, daemon={"lease_ttl": f"{TTL}s"})

    def fill() -> None:
        with pytest.raises(OSError, match="No space left"):
            ballast.write_bytes(bytes(2 << 20))
        daemon.wait_for(lambda: refuses(daemon.link), what="the server refuses to write")

    try:
        with daemon:
            settle_after(daemon, fill, ballast.unlink)
    finally:
        daemon.close()
        server.close()


def refuses(link: Connection) -> bool:
    """Return True if the server has noticed that it cannot write its file."""
    answer = link.pipeline([("SET", "probe", "x")])[0]
    return getattr(answer, "code", "") == "MISCONF"
