"""A killed supervisor leaves its scoreboard, which shows the finished and the running messages."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd.cli import cli
from streamqd.model import Assignment
from streamqd.scoreboard import BOARD_BYTES, HEADER_OFFSET, SLOT_BYTES
from streamqd.supervisor import scoreboard_file
from tests.support import quick
from tests.support.daemon import GROUP, TOPIC, Daemon

pytestmark = pytest.mark.promise

NewDaemon = Callable[..., Daemon]

COMMON = """
import asyncio, time
from pathlib import Path
from streamqd import Message
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1", durable=False)
"""
SYNC = """
def obey(message: Message) -> None:
    with ledger.run(message):
        word, *rest = message.text().split()
        while word == "await" and not Path(rest[0]).exists():
            time.sleep(0.002)
        if word == "sleep":
            time.sleep(float(rest[0]))
"""
TASKS = SYNC.replace("def obey", "async def obey").replace("time.sleep", "await asyncio.sleep")
BATCH = """
def obey(messages: list[Message]) -> None:
    for message in messages:
        ledger._note_run("start", message)
    for word, *rest in [message.text().split() for message in messages]:
        while word == "await" and not Path(rest[0]).exists():
            time.sleep(0.002)
    time.sleep(0.005)
    for message in messages:
        ledger._note_run("end", message)
"""
WIDE = {"concurrency": 8, "order": "none"}
# The handler's code, the consumer's settings, and how many messages run at a time.
SHAPES = {
    "sync": (SYNC, {}, 1),
    "tasks": (TASKS, WIDE, 8),
    "threads": (SYNC, WIDE, 8),
    "batch": (BATCH, {"batch": 5}, 5),
}
PARTITIONS = 2
# This many bytes of a sparse file of hundreds of megabytes are in use.
USED = BOARD_BYTES + PARTITIONS * SLOT_BYTES


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a private directory in memory, so that a test sees only its own files."""
    folder = scoreboard_file.folder(os.environ, os.geteuid())
    if folder is None:
        pytest.skip("no memory file system can be written")
    own = folder / f"test-{os.getpid()}-{tmp_path.name}"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(own))
    yield own
    for each in own.iterdir():
        each.unlink()
    own.rmdir()


def find_board(runtime: Path) -> Path:
    (found,) = runtime.glob(f"*{scoreboard_file.SUFFIX}")
    return found


def read_beginning(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


def overwrite(path: Path, at: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


def read_header(path: Path) -> dict[str, Any]:
    return scoreboard_file.unpack_header(read_beginning(path, BOARD_BYTES)[HEADER_OFFSET:])


def kill_and_wait(daemon: Daemon) -> int:
    """Kill the supervisor and wait until its children are gone. Return the log mark from before."""
    mark = daemon.mark()
    daemon.kill()
    daemon.wait_gone(5.0)
    return mark


def crashes(daemon: Daemon, uid: str) -> int:
    topic, partition, entry = uid.split("/")
    key = daemon.keys.attempts(topic, int(partition), GROUP)
    return int(daemon.link.execute("HGET", key, f"m:{entry}:c") or 0)


@pytest.mark.fault("F6")
@pytest.mark.parametrize("shape", quick.slow_after(2, SHAPES))
def test_killed_supervisor_repeats_only_running_messages(new_daemon: NewDaemon, shape: str):
    """After three kills among 1,000 messages of 5 ms, only running messages are handled again."""
    code, consumer, width = SHAPES[shape]
    daemon = new_daemon(partitions=PARTITIONS, code=COMMON + code, consumer=consumer)
    with daemon:
        uids = daemon.send(["sleep 0.005"] * 1000)
        for kill in range(1, 4):
            daemon.wait_for(
                lambda wanted=kill * 200: daemon.ledger.count("end") >= wanted,
                what="some have ended",
                timeout=60,
                every=0.001,
            )
            mark = kill_and_wait(daemon)
            before, ended = len(daemon.ledger.records()), daemon.ledger.finished_uids(GROUP)
            daemon.start()
            for partition in range(PARTITIONS):
                told = daemon.wait_event("lease.resumed", after=mark, partition=partition)
                assert len(told.get("running", [])) <= width
            if ended == set(uids):  # on a busy machine, the kill comes too late
                continue
            daemon.wait_for(lambda at=before: len(daemon.ledger.records()) > at, what="it goes on")
        daemon.wait_settled(60)
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        print(f"{shape}: {len(audit.repeated)} repeats of 3 kills")
        assert sum(audit.repeated.values()) - len(audit.repeated) <= 3 * PARTITIONS * width
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert (daemon.letters(), daemon.traces()) == ([], [])
        assert daemon.events("scoreboard.refused") == []
        assert daemon.stop() == 0


@pytest.mark.parametrize("shape", ["tasks", "threads"])
def test_waiting_message_is_not_suspected(new_daemon: NewDaemon, shape: str):
    """Three kills in a row do not dead-letter messages that were only waiting at the first kill.

    The scoreboard names the running messages, so only these 8 are suspected. After the loss of a
    host, by contrast, all pending messages run in marked rounds.
    """
    code, consumer, width = SHAPES[shape]
    daemon = new_daemon(partitions=PARTITIONS, code=COMMON + code, consumer=consumer)
    with daemon:
        waiting = send_more_than_may_run(daemon, width)
        kill_and_wait(daemon)
        (daemon.folder / "first").touch()
        daemon.start()
        for assignment, uids in waiting.items():
            for uid in uids[:width]:
                daemon.wait_run(uid)
            assert read_marks(daemon, assignment) == [None, None]
        (daemon.folder / "second").touch()
        daemon.wait_settled(60)
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert len(audit.repeated) == PARTITIONS * width, "only what ran is repeated"
        assert daemon.stop() == 0


def test_host_loss_in_a_marked_round_suspects_all_pending(new_daemon: NewDaemon):
    """If the host is lost in a marked round, all pending messages are suspects.

    The scoreboard names the messages of the second kill, but not those that have been waiting since
    the first one.
    """
    code, consumer, width = SHAPES["threads"]
    daemon = new_daemon(partitions=PARTITIONS, code=COMMON + code, consumer=consumer)
    with daemon:
        waiting = send_more_than_may_run(daemon, width)
        kill_and_wait(daemon)
        daemon.start()
        for assignment in waiting:
            daemon.wait_for(
                lambda at=assignment: all(read_marks(daemon, at)), what="a round is marked"
            )
        kill_and_wait(daemon)
        (daemon.folder / "first").touch()
        daemon.start()
        # The accused messages of one partition wait until the other partition's round ends, which
        # may take longer.
        starts = {uids[0]: assignment for assignment, uids in waiting.items()}
        daemon.wait_for(
            lambda: any(daemon.ledger.records_for(uid, "start") for uid in starts),
            what="one has run",
        )
        uid = next(uid for uid in starts if daemon.ledger.records_for(uid, "start"))
        quarantine, mark = read_marks(daemon, starts[uid])
        assert quarantine == b"1"
        assert mark is not None
        assert b"m:" + uid.split("/")[2].encode() in mark.split()
        (daemon.folder / "second").touch()
        daemon.wait_settled(60)
        assert daemon.ledger.audit(GROUP).lost == []
        assert daemon.stop() == 0


def send_more_than_may_run(daemon: Daemon, width: int) -> dict[Assignment, list[str]]:
    """Send messages until more than `width` are fetched.

    Return those that are waiting, by assignment.
    """
    waiting = {}
    for partition in range(PARTITIONS):
        words = ["await first"] * width + ["await second"] * 2 * width
        uids = daemon.send(words, partition=partition)
        for uid in uids[:width]:
            daemon.wait_run(uid)
        daemon.wait_for(
            lambda at=partition: daemon.pending(at) > width, what="some are fetched and wait"
        )
        waiting[Assignment(TOPIC, partition, GROUP)] = uids[width:]
    return waiting


def read_marks(daemon: Daemon, assignment: Assignment) -> list[bytes | None]:
    """Return the fields `quarantine` and `mark` of the assignment's fence."""
    return daemon.link.execute("HMGET", daemon.keys.fence(*assignment), "quarantine", "mark")


@pytest.mark.fault("F6")
@pytest.mark.parametrize("shape", quick.slow_after(2, SHAPES))
def test_single_run_is_charged_after_a_supervisor_kill(new_daemon: NewDaemon, shape: str):
    """A message that was running alone at the kill is charged. If several ran, none is."""
    code, consumer, width = SHAPES[shape]
    daemon = new_daemon(code=COMMON + code, consumer=consumer)
    with daemon:
        uids = daemon.send(["sleep 0"] * 20)
        daemon.wait_settled()
        running = daemon.send(["await go"] * width)
        for uid in running:
            daemon.wait_run(uid)
        behind = daemon.send(["sleep 0"] * 20)

        mark = kill_and_wait(daemon)
        daemon.start()
        daemon.wait_run(running[0], count=2)

        places = {"m:" + uid.split("/")[2] for uid in running}
        assert set(daemon.wait_event("lease.resumed", after=mark)["running"]) == places
        charged = [uid for uid in uids + running + behind if crashes(daemon, uid)]
        assert charged == (running if width == 1 else [])
        assert [crashes(daemon, uid) for uid in charged] == [1] * len(charged)
        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP).repeated == dict.fromkeys(running, 2)
        assert daemon.stop() == 0


@pytest.mark.fault("F6")
def test_successor_killed_before_a_reply_charges_once(new_daemon: NewDaemon, runtime: Path):
    """One death is charged only once, no matter how many supervisors report it."""
    with new_daemon(code=COMMON + SYNC) as daemon:
        (running,) = daemon.send(["await go"])
        daemon.wait_run(running)
        mark = kill_and_wait(daemon)
        first = read_beginning(find_board(runtime), USED)
        daemon.start()
        daemon.wait_event("lease.resumed", after=mark)
        daemon.wait_run(running, count=2)
        assert crashes(daemon, running) == 1
        kill_and_wait(daemon)
        # Simulate a successor that never received its reply, so that the tokens in the file are
        # outdated.
        overwrite(find_board(runtime), 0, first)
        mark = daemon.mark()
        daemon.start()
        daemon.wait_run(running, count=3)
        assert daemon.events("lease.resumed", mark) == []
        assert crashes(daemon, running) == 1
        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.stop() == 0


@pytest.mark.fault("F6")
def test_messages_are_not_acknowledged_after_another_owner(
    new_daemon: NewDaemon,
):
    """The epoch increased while the supervisor was dead, so Redis refuses its report."""
    daemon = new_daemon(code=COMMON + SYNC, daemon={"lease_ttl": "1s"})
    with daemon:
        (running,) = daemon.send(["await go"])
        daemon.wait_run(running)
        mark = kill_and_wait(daemon)
        fence = daemon.keys.fence(TOPIC, 0, GROUP)
        # In the meantime, another instance acquired the partition, ran nothing, and released it.
        daemon.link.execute("HSET", fence, "epoch", int(time.time() * 1000) + 5)
        daemon.link.execute("HDEL", fence, "token", "owner")
        daemon.link.execute("DEL", daemon.keys.lease(TOPIC, 0, GROUP))
        daemon.start()
        daemon.wait_event("lease.lost", after=mark)
        daemon.wait_run(running, count=2)
        assert daemon.events("lease.resumed", mark) == []
        assert crashes(daemon, running) == 0
        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.stop() == 0


def test_scoreboard_is_refused_after_an_emptied_redis(new_daemon: NewDaemon):
    """A scoreboard is refused if Redis has lost its data or is another server.

    Redis then has other tokens than the scoreboard.
    """
    with new_daemon(code=COMMON + SYNC) as daemon:
        (running,) = daemon.send(["await go"])
        daemon.wait_run(running)
        mark = kill_and_wait(daemon)
        daemon.link.execute("FLUSHALL")
        daemon.start()
        daemon.wait_event("lease.lost", after=mark)
        daemon.wait_event("daemon.ready", after=mark)
        (uid,) = daemon.send(["sleep 0"])
        daemon.wait_run(uid, "end")
        daemon.wait_settled()
        assert daemon.link.execute("HLEN", daemon.keys.attempts(TOPIC, 0, GROUP)) == 0
        assert daemon.stop() == 0


def _other_boot(header: dict[str, Any]) -> None:
    header["boot"] = "11111111-1111-1111-1111-111111111111"


def _other_fleet(header: dict[str, Any]) -> None:
    header["fleet"] = "another"


def _other_layout(header: dict[str, Any]) -> None:
    header["layout"] = 999


@pytest.mark.parametrize("change", [_other_boot, _other_fleet, _other_layout])
def test_scoreboard_of_another_boot_or_fleet_is_refused(
    new_daemon: NewDaemon, runtime: Path, change: Callable[[dict[str, Any]], None]
):
    """A file of another boot, fleet or version is refused. It is renamed, and the log names it."""

    def tamper(path: Path) -> None:
        header = read_header(path)
        change(header)
        overwrite(path, HEADER_OFFSET, scoreboard_file.pack_header(header))

    name = change.__name__.removeprefix("_other_")
    assert name in refusal(new_daemon, runtime, tamper)


def _torn_header(path: Path) -> None:
    overwrite(path, HEADER_OFFSET + 40, b"\xff")


def _cut(path: Path) -> None:
    os.truncate(path, BOARD_BYTES + 10)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _noise(path: Path) -> None:
    path.write_bytes(os.urandom(9000))


def _readable(path: Path) -> None:
    path.chmod(0o644)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _torn_token(path: Path) -> None:
    name = f"{TOPIC}\n0\n{GROUP}".encode()
    overwrite(path, read_beginning(path, USED).index(name, BOARD_BYTES) + 192, b"f" * 8)


@pytest.mark.parametrize(
    "tamper",
    quick.slow_after(3, [_torn_header, _link, _torn_token, _cut, _empty, _noise, _readable]),
)
def test_damaged_scoreboard_file_is_refused_and_named(
    new_daemon: NewDaemon, runtime: Path, tamper: Callable[[Path], None]
):
    """A file that is torn, or that other users could have changed, is refused and named."""
    refusal(new_daemon, runtime, tamper)


def refusal(new_daemon: NewDaemon, runtime: Path, tamper: Callable[[Path], None]) -> str:
    """Tamper with the file of a killed supervisor.

    Return the problem that the next supervisor logs.
    """
    with new_daemon(code=COMMON + SYNC) as daemon:
        (running,) = daemon.send(["await go"])
        daemon.wait_run(running)
        mark = kill_and_wait(daemon)
        path = find_board(runtime)
        tamper(path)
        daemon.start()
        refused = daemon.wait_event("scoreboard.refused", after=mark)
        assert refused["file"] == str(path)
        assert_renamed(daemon, path, str(refused["problem"]))
        daemon.wait_run(running, count=2)
        assert daemon.events("lease.resumed", mark) == []
        assert crashes(daemon, running) == 0
        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.stop() == 0
        assert list(runtime.glob(f"*{scoreboard_file.SUFFIX}")) == []
    return str(refused["problem"])


def assert_renamed(daemon: Daemon, path: Path, problem: str) -> None:
    """Check that an unusable file is renamed, and that the log and `doctor` name it."""
    aside = path.with_suffix(scoreboard_file.REFUSED)
    if "slot" in problem:  # the other slots are used, so the file keeps its name
        assert not aside.exists()
        return
    assert f"it was renamed to {aside}; delete it" in problem
    assert os.path.lexists(aside)
    daemon.wait_for(lambda: str(aside) in run_doctor(daemon), what="doctor names the file")
    aside.unlink()
    daemon.wait_for(lambda: str(aside) not in run_doctor(daemon), what="doctor is content")


def run_doctor(daemon: Daemon) -> str:
    words = ["--config", str(daemon.config_path), "doctor", "--only", "fleet.scoreboard-refused"]
    return CliRunner().invoke(cli, words).output


def test_full_tmpfs_kills_no_process(new_daemon: NewDaemon, runtime: Path):
    """If the tmpfs has no free page, the scoreboard gets no file, and no process dies of SIGBUS."""
    full = runtime / "mount"
    full.mkdir(mode=0o700)
    daemon = new_daemon(partitions=2, code=COMMON + SYNC)
    daemon.within = [
        *("unshare", "--user", "--map-root-user", "--mount", "--"),
        *("sh", "-c", f'mount -t tmpfs -o size=8k,mode=700 none {full} && exec "$@"', "sh"),
    ]
    daemon.environment["RUNTIME_DIRECTORY"] = str(full)
    try:
        with daemon:
            daemon.send(["sleep 0"] * 10)
            daemon.wait_settled()
            assert daemon.wait_event("scoreboard.private")["problem"]
            assert daemon.stop() == 0
    finally:
        full.rmdir()


def test_scoreboard_file_is_private_and_deleted_by_a_drain(new_daemon: NewDaemon, runtime: Path):
    """The file contains tokens, so only its user may read it.

    An instance that has drained deletes it.
    """
    with new_daemon(partitions=2) as daemon:
        path = find_board(runtime)
        assert path.stat().st_mode & 0o777 == 0o600
        header = read_header(path)
        found = scoreboard_file.read(path, header)
        assignments = {each.lease.assignment for each in found.partitions}
        assert assignments == {Assignment(TOPIC, n, GROUP) for n in range(2)}
        assert found.damaged == []
        json.dumps(header)
        assert daemon.stop() == 0
    assert list(runtime.iterdir()) == []
