"""Crash points: named places between two steps, where a test can strike a process from outside.

    python -m tests.support.crash_points --config streamq.toml …

runs `streamqd` with all points in place. To arm a point, write a file `POINT@WHERE` to the folder
that STRIKES names. The file contains `KILL` or `STOP`, which is the signal that the process sends
to itself, and the number of times that the point is passed before the strike. WHERE is the number
of the partition, or `-` if the point belongs to none. A point strikes once, in the first process
that reaches it. The pid of that process is then in `POINT@WHERE.struck`.

streamqd itself contains no crash points. They are wrapped around its functions before it forks.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

from streamqd.housekeeper import Task
from streamqd.housekeeper.reclaimer import Reclaimer
from streamqd.model import Assignment
from streamqd.outbox.database import Database
from streamqd.producer.sender import Sender
from streamqd.scoreboard import WorkerSlot
from streamqd.store.client import Connection
from streamqd.store.fetch import Fetcher, FetchResult
from streamqd.store.scripts import Call, Reply, Script
from streamqd.supervisor.partition import AssignmentState
from streamqd.supervisor.worker_pool import WorkerPool
from streamqd.worker.hooks import Hooks
from streamqd.worker.settler import Settler
from streamqd.worker.verdicts import Verdicts
from streamqd.worker.worker import WorkerLoop

VARIABLE = "STRIKES"  # the environment variable that names the folder
LOOK_SECONDS = 2.0  # the longest time between two runs of a housekeeper task

# Points between steps that are not scripts, in the order in which they are reached.
WORKER = {
    "fetch-unsent": "a read is sent next",
    "fetch-sent": "a read was sent, without a reply yet",
    "fetch-answered": "the entries were received, but are not in the slot yet",
    "batch-recorded": "the batch is in the slot, and none of it has started",
    "handler-starts": "the entry is marked as running, and the handler is called next",
    "handler-returned": "the handler returned, and the entry is still marked as running",
    "outcome-unrecorded": "the handler failed, and its error is not evaluated yet",
    "outcome-recorded": "the entry is marked as done or failed, but only in the slot",
    "acks-unsent": "acknowledgments are sent next, with a read",
    "acks-sent": "acknowledgments were sent with a read",
    "acks-answered": "the server replied, but the acknowledgments still count as unsent",
}
SUPERVISOR = {
    "worker-ended": "a worker was reaped, and its entries are not evaluated yet",
    "worker-judged": "the message to charge is known, but not written to Redis",
    "worker-forked": "a worker was forked, but is not recorded",
}
HOUSEKEEPER = {"reclaim-flagged": "a worker was notified of entries of another client"}
PRODUCER = {
    "publish-unsent": "messages are sent next, by any kind of call",
    "publish-answered": "the server replied, but the sender has not read the reply",
}
RELAY = {
    "rows-unread": "the rows of a database are read next",
    "rows-read": "rows were read, and none is written to Redis",
    "delete-unsent": "the rows are in their topics, and still in the database",
    "delete-answered": "the rows are deleted, but still count as pending deletes",
    "dead-row-unsent": "a row cannot be sent, and is still in its table",
    "dead-row-answered": "the row is in the dead-letter table, but is not recorded",
}
# Each script that changes something has two points: before it is sent, and after its reply.
# `message_promote` has two pairs, and the last call of `quarantine_mark` has its own pair
# (`quarantine_end`).
SCRIPTS = {
    "worker": (
        *("message_recover", "settle_ack", "settle_retry", "settle_dead", "settle_charged"),
        *("quarantine_mark", "quarantine_end", "message_reclaim", "settle_note", "group_restore"),
    ),
    "supervisor": (
        *("lease_acquire", "group_ensure", "lease_renew", "lease_refence", "lease_release"),
        *("member_heartbeat", "member_leave"),
    ),
    "housekeeper": ("message_promote", "schedule_promote", "stream_trim", "letters_expire"),
    "schedules": (
        *("schedule_declare", "schedule_stamp", "schedule_fire", "schedule_hold", "schedule_drop"),
    ),
    "relay": ("outbox_acquire", "outbox_renew", "outbox_fence", "outbox_publish", "outbox_release"),
    "command": ("dead_replay", "dead_mark", "dead_deliver", "dead_purge"),
}
POINTS = {
    *WORKER,
    *SUPERVISOR,
    *HOUSEKEEPER,
    *PRODUCER,
    *RELAY,
    *(
        f"{name}-{side}"
        for names in SCRIPTS.values()
        for name in names
        for side in ("calls", "called")
    ),
}

# Scripts that change something but have no points here, with the reason.
ELSEWHERE = {
    **dict.fromkeys(
        ("message_append", "message_publish", "message_schedule"),
        "the points of a producer are around it",
    ),
    "message_fetch": "a read for a server whose memory is full; the points of a read are there",
    "missing_settle": "lets go of entries that are gone already",
    **dict.fromkeys(
        (
            *("control_change", "group_delete", "group_reset", "message_adopt", "retry_cancel"),
            *("schedule_release", "schedule_run"),
            *("retry_make_due", "stream_drop", "topic_configure", "topic_create", "topic_retire"),
        ),
        "one step of a command that may be given again",
    ),
    **dict.fromkeys(
        ("growth_start", "growth_mark", "growth_switch", "growth_finish"),
        "steps of a command that goes on where another has stopped",
    ),
    **dict.fromkeys(
        (
            *("archive_advance", "query_position", "sink_start", "sink_publish", "sink_finish"),
            *("pipeline_lease_acquire", "pipeline_lease_renew", "pipeline_lease_release"),
        ),
        "Spark's, killed by `make soak NAME=spark`",
    ),
}
_MOVERS = ("message_promote", "stream_trim", "dead_purge")  # called even with nothing to do
_PARTITION = re.compile(rb":p:(\d+)\}")
_passed: Counter[Path] = Counter()
_own = "-"  # in a worker, the partition of this process


class Strikes:
    """The folder of armed points, for use by a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def arm(self, point: str, where: int | str, act: str, after: int = 0) -> None:
        """Arm a point. It strikes when it is reached after it was passed `after` times."""
        assert point in POINTS, point
        (self.folder / f"{point}@{where}").write_text(f"{act} {after}")

    def struck(self, point: str, where: int | str) -> int | None:
        """Return the pid of the struck process once it is stopped or dead, or None before that."""
        path = self.folder / f"{point}@{where}.struck"
        if not path.exists():
            return None
        pid = int(path.read_text())
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return pid
        # The file is written before the signal. If the process were resumed now, it might stop only
        # afterwards.
        return pid if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) else None


def reach(point: str, where: str = "") -> None:
    """Strike this process if the point is armed for the given place."""
    path = Path(os.environ[VARIABLE]) / f"{point}@{where or _own}"
    try:
        act, after = path.read_text().split()
    except FileNotFoundError:
        return
    _passed[path] += 1
    if _passed[path] <= int(after):
        return
    noted = path.with_name(f"{path.name}.{os.getpid()}")
    noted.write_text(str(os.getpid()))
    path.unlink()
    noted.rename(path.with_name(f"{path.name}.struck"))
    os.kill(os.getpid(), signal.Signals[f"SIG{act}"])


def point_name(script: Script, argv: Sequence[Any]) -> str:
    """Return the point's name for a call, which is the script's name or names one use of it."""
    keys, values = argv[: len(script.keys)], argv[len(script.keys) :]
    special = {
        "quarantine_mark": ("quarantine_end", lambda: not values[3]),
        "settle_ack": ("settle_charged", lambda: int(values[2]) > 0),
        "message_promote": ("schedule_promote", lambda: b":retry:" not in _bytes(keys[2])),
        "dead_purge": ("letters_expire", lambda: bool(values[0])),
    }
    other, is_other = special.get(script.name, ("", lambda: False))
    return other if is_other() else script.name


def partition_number(argv: Sequence[Any]) -> str:
    """Return the number of the partition that a call's keys belong to, or `-` if there is none."""
    found = _PARTITION.search(_bytes(argv[0]))
    return found[1].decode() if found else "-"


def _bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


# --- where they are -------------------------------------------------------------------------------


def install() -> None:
    """Install all points. Call this once, before anything forks."""
    _wrap(Connection, "run", before=_before_call, after=_after_call)
    _wrap(Connection, "run_each", before=_before_calls, after=_after_calls)
    _wrap(Fetcher, "send_round", before=_before_fetch, after=_after_fetch_sent)
    _wrap(Fetcher, "receive_round", after=_after_fetch_reply)
    _wrap(WorkerLoop, "__init__", after=_note_own_partition)
    _wrap_handler()
    _wrap(Settler, "begin_batch", after=lambda *_: reach("batch-recorded"))
    _wrap(Verdicts, "settle_failure", before=lambda *_: reach("outcome-unrecorded"))
    _wrap(Settler, "ack", before=lambda *_: reach("outcome-recorded"))
    _wrap(Settler, "fail", after=lambda *_: reach("outcome-recorded"))
    _wrap(
        AssignmentState,
        "on_exit",
        before=_reach_in_partition("worker-ended"),
        after=_reach_in_partition("worker-judged", 1),
    )
    _wrap(WorkerPool, "start_worker", after=_reach_in_partition("worker-forked", 2))
    _wrap_reclaimer()
    for name, before, after in (
        ("read_oldest", "rows-unread", "rows-read"),
        ("delete", "delete-unsent", "delete-answered"),
        ("move_to_dead_table", "dead-row-unsent", "dead-row-answered"),
    ):
        _wrap(Database, name, before=_reach_anywhere(before), after=_reach_anywhere(after))
    _wrap(Task, "__init__", after=_shorten_interval)
    _wrap(
        Sender,
        "_exchange",
        before=_reach_anywhere("publish-unsent"),
        after=_reach_anywhere("publish-answered"),
    )


def _wrap(
    owner: type,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Wrap a method with calls before and after it.

    `before` gets the arguments of the method. `after` gets its result, followed by the arguments.
    """
    inner: Any = getattr(owner, name)

    @wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = inner(*args, **kwargs)
        if after is not None:
            after(result, *args)
        return result

    setattr(owner, name, wrapped)


def _before_call(_link: Connection, call: Call) -> None:
    reach(f"{point_name(call.script, call.argv)}-calls", partition_number(call.argv))


def _after_call(reply: object, _link: Connection, call: Call) -> None:
    did = isinstance(reply, Reply)
    if isinstance(reply, Reply) and call.script.name in _MOVERS:
        did = reply.word == "OK" and int(reply.values[0]) > 0
    if did:
        reach(f"{point_name(call.script, call.argv)}-called", partition_number(call.argv))


def _before_calls(link: Connection, calls: Sequence[Call]) -> None:
    for call in calls:
        _before_call(link, call)


def _after_calls(replies: Sequence[object], link: Connection, calls: Sequence[Call]) -> None:
    for reply, call in zip(replies, calls, strict=True):
        _after_call(reply, link, call)


def _before_fetch(_fetcher: Fetcher, main_acks: list[bytes], *_: object) -> None:
    reach("acks-unsent" if main_acks else "fetch-unsent")


def _after_fetch_sent(_none: None, _fetcher: Fetcher, main_acks: list[bytes], *_: object) -> None:
    reach("acks-sent" if main_acks else "fetch-sent")


def _after_fetch_reply(found: FetchResult, _fetcher: Fetcher, *_: object) -> None:
    if found.acked:
        reach("acks-answered")
    elif found.main or found.retried:
        reach("fetch-answered")


def _note_own_partition(_none: None, worker: WorkerLoop, *_: object) -> None:
    global _own
    _own = str(worker.assignment.partition)


def _wrap_handler() -> None:
    function = Hooks.function.fget
    assert function is not None

    def handler(hooks: Hooks) -> Callable[..., object]:
        handled = function(hooks)

        def handle(taken: object) -> object:
            reach("handler-starts")
            try:
                return handled(taken)
            finally:
                reach("handler-returned")

        return handle

    Hooks.function = property(handler)  # type: ignore[assignment,method-assign]


def _reach_in_partition(point: str, at: int = 0) -> Callable[..., None]:
    """Return a hook that reaches a point in the partition of one of its arguments.

    `at` is the position of this argument.
    """

    def reach_here(*args: Any) -> None:
        reach(point, str(args[at].assignment.partition))

    return reach_here


def _reach_anywhere(point: str) -> Callable[..., None]:
    return lambda *_: reach(point, "-")


def _shorten_interval(_none: None, task: Task, *_: object) -> None:
    """Shorten the interval of rare housekeeper tasks, to avoid waiting for half a minute."""
    task.every = min(task.every, LOOK_SECONDS)


def _wrap_reclaimer() -> None:
    look = Reclaimer.run

    def run(reclaimer: Reclaimer, owned: Iterable[tuple[WorkerSlot, Assignment]]) -> float | None:
        slots = list(owned)
        sooner = look(reclaimer, slots)
        for slot, assignment in slots:
            if slot.reclaim_requested != slot.reclaim_done:
                reach("reclaim-flagged", str(assignment.partition))
        return sooner

    Reclaimer.run = run  # type: ignore[method-assign]


def main() -> None:
    """Run the command given by the arguments, with all points installed."""
    from streamqd.cli import main as streamqd

    install()
    streamqd()


if __name__ == "__main__":
    main()
