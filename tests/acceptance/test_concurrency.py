"""Several messages of a partition run at a time without a loss, a wrong charge or a wrong order.

Most tests run once with coroutines and once with threads. Both handlers understand the same
payloads.
"""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import psutil
import pytest

from streamqd.config import load
from streamqd.producer import Outgoing, Producer
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.ledger import Audit

NewDaemon = Callable[..., Daemon]

COMMON = """
import asyncio, os, time
from pathlib import Path
from streamqd import Message, Release
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1")
released = set()

def spin(steps: str) -> None:
    for _ in range(int(steps)):
        pass

def release_once(message: Message) -> None:
    if message.uid not in released:
        released.add(message.uid)
        raise Release
"""
TASKS = """
async def obey(message: Message) -> None:
    with ledger.run(message):
        word, *rest = message.text().split()
        if word == "await":
            while not Path(rest[0]).exists():
                await asyncio.sleep(0.002)
        elif word == "spin":
            spin(rest[0])
            await asyncio.sleep(0)
        elif word == "exit":
            os._exit(9)
        elif word == "hold":
            time.sleep(600)
        elif word == "release":
            release_once(message)
"""
THREADS = TASKS.replace("async def", "def").replace("await asyncio", "time")
KINDS = {"tasks": COMMON + TASKS, "threads": COMMON + THREADS}
FAST = {"kind": "fixed", "base": "10ms", "jitter": "none"}

each_kind = pytest.mark.parametrize("kind", KINDS)


def consumer(**changed: object) -> dict[str, object]:
    return {"concurrency": 8, "order": "none", "backoff": FAST, **changed}


@each_kind
def test_kill_repeats_only_running_messages_uncharged(new_daemon: NewDaemon, kind: str):
    with new_daemon(consumer=consumer(), code=KINDS[kind]) as daemon:
        uids = daemon.send(["spin 100"] * 100 + ["await go"] * 8 + ["spin 100"] * 100)
        running = set(uids[100:108])
        for uid in running:
            daemon.wait_run(uid)
        mark = daemon.mark()

        worker = psutil.Process(daemon.pids()[0])
        worker.suspend()
        daemon.wait_for(lambda: worker.status() == psutil.STATUS_STOPPED, what="it stands still")
        (daemon.folder / "go").touch()
        worker.kill()

        daemon.wait_settled()
        assert "charged" not in daemon.wait_event("worker.crashed", after=mark)
        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert audit.repeated == dict.fromkeys(running, 2)
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert (daemon.letters(), daemon.traces()) == ([], [])
        assert daemon.stop() == 0


@pytest.mark.fault("F1")
@each_kind
def test_kills_at_random_moments_lose_nothing(
    new_daemon: NewDaemon, chance: random.Random, kind: str
):
    daemon = new_daemon(
        consumer=consumer(max_crashes=0),
        daemon={"crash_backoff": {"kind": "fixed", "base": "1ms"}},
        code=KINDS[kind],
    )
    with daemon:
        uids = daemon.send(f"spin {chance.randrange(30_000)}" for _ in range(1200))
        for number in range(1, 7):
            wanted = number * 120 + chance.randrange(60)
            daemon.wait_for(
                lambda wanted=wanted: daemon.ledger.count("start") >= wanted,
                what="more messages run",
                every=0.0005,
            )
            mark = daemon.mark()
            os.kill(daemon.pids()[0], signal.SIGKILL)
            daemon.wait_event("worker.ready", after=mark)
        daemon.wait_settled(60)

        audit = daemon.ledger.audit(GROUP)
        assert (audit.lost, audit.unexpected) == ([], [])
        assert daemon.ledger.finished_uids(GROUP) == set(uids)
        assert sum(audit.repeated.values()) - len(audit.repeated) <= 6 * 8, "8 run, no more"
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert (daemon.letters(), daemon.traces()) == ([], [])
        assert daemon.stop() == 0


@each_kind
def test_messages_of_a_key_keep_their_order(
    new_daemon: NewDaemon, chance: random.Random, kind: str
):
    with new_daemon(consumer=consumer(order="key"), code=KINDS[kind]) as daemon:
        keys = [f"k{chance.randrange(12)}" for _ in range(600)]
        with Producer(settings=load(daemon.config_path)) as producer:
            outgoing = [Outgoing(f"spin {chance.randrange(8000)}", key=key) for key in keys]
            ids = producer.send_many(TOPIC, outgoing)
        sent = defaultdict(list)
        for key, found in zip(keys, ids, strict=True):
            sent[key].append(found)
        daemon.wait_settled()

        key_of = {uid: key for key, uids in sent.items() for uid in uids}
        runs = defaultdict(list)
        at_once = most = 0
        for record in daemon.ledger.records("start", "end"):
            runs[key_of[record.uid]].append((record.kind, record.uid))
            at_once += 1 if record.kind == "start" else -1
            most = max(most, at_once)
        expected = {
            key: [(kind, uid) for uid in uids for kind in ("start", "end")]
            for key, uids in sent.items()
        }
        assert runs == expected
        assert 1 < most <= 8
        assert daemon.stop() == 0


def test_order_partition_keeps_the_order_of_the_partition(new_daemon: NewDaemon):
    with new_daemon(consumer=consumer(order="partition"), code=KINDS["tasks"]) as daemon:
        uids = daemon.send(["spin 1000"] * 60)
        daemon.wait_settled()
        found = [(each.kind, each.uid) for each in daemon.ledger.records("start", "end")]
        assert found == [(kind, uid) for uid in uids for kind in ("start", "end")]


@each_kind
def test_slow_message_does_not_delay_others(new_daemon: NewDaemon, kind: str):
    with new_daemon(consumer=consumer(concurrency=2), code=KINDS[kind]) as daemon:
        (slow,) = daemon.send(["await go"])
        daemon.wait_run(slow)
        for _ in range(3):  # these include messages that are sent while it runs
            more = daemon.send(["spin 10"] * 40)
            daemon.wait_for(
                lambda more=more: (
                    set(more) <= daemon.ledger.finished_uids(GROUP) and daemon.pending() == 1
                ),
                what="the others are settled",
            )
        (daemon.folder / "go").touch()
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()


@each_kind
def test_drain_finishes_running_messages(new_daemon: NewDaemon, kind: str):
    daemon = new_daemon(consumer=consumer(), code=KINDS[kind])
    with daemon:
        uids = daemon.send(["await go"] * 8 + ["spin 10"] * 2000)
        for uid in uids[:8]:
            daemon.wait_run(uid)
        daemon.signal(signal.SIGTERM)
        daemon.wait_event("drain.started")
        (daemon.folder / "go").touch()
        assert daemon.wait() == 0
        ended = daemon.ledger.finished_uids(GROUP)
        assert set(uids[:8]) <= ended == {each.uid for each in daemon.ledger.records("start")}
        assert daemon.unsettled() == len(uids) - len(ended) > 0
        assert daemon.traces() == []
        daemon.start()
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.stop() == 0


@each_kind
def test_pause_finishes_runs_and_starts_none(new_daemon: NewDaemon, kind: str):
    with new_daemon(consumer=consumer(concurrency=2), code=KINDS[kind]) as daemon:
        uids = daemon.send(["await go"] * 2 + ["spin 10"] * 20)
        for uid in uids[:2]:
            daemon.wait_run(uid)
        daemon.signal(signal.SIGTSTP)
        (daemon.folder / "go").touch()
        daemon.pause()
        begun = {each.uid for each in daemon.ledger.records("start")}
        assert begun == daemon.ledger.finished_uids(GROUP)
        daemon.signal(signal.SIGCONT)
        daemon.wait_settled()
        assert daemon.ledger.audit(GROUP) == Audit()


@pytest.mark.promise
@pytest.mark.fault("F1")
@each_kind
def test_message_that_kills_its_process_is_identified(new_daemon: NewDaemon, kind: str):
    with new_daemon(consumer=consumer(max_crashes=2), code=KINDS[kind]) as daemon:
        daemon.pause()
        uids = daemon.send(["await go"] * 4 + ["exit 9"] + ["await go"] * 20)
        killer = uids[4]
        daemon.signal(signal.SIGCONT)
        daemon.wait_event("worker.crashed")
        (daemon.folder / "go").touch()
        daemon.wait_settled()

        (letter,) = daemon.letters()
        assert (letter["uid"], letter["reason"], letter["crashes"]) == (killer, "crashes", "2")
        crashes = daemon.events("worker.crashed")
        charged = [each["charged"] for each in crashes if "charged" in each]
        assert charged == ["m:" + killer.rpartition("/")[2]] * 2
        assert len(crashes) == 5, "of 8, of a round of 4 and of one of 2, and twice alone"
        audit = daemon.ledger.audit(GROUP)
        assert audit.lost == [killer]
        assert audit.repeated.pop(killer) == 5
        assert set(audit.repeated.values()) <= {2, 3, 4}
        assert daemon.stop() == 0


@each_kind
def test_soft_limit_applies_to_each_run(new_daemon: NewDaemon, kind: str):
    settings = consumer(timeout="300ms", max_attempts=1)
    with new_daemon(consumer=settings, code=KINDS[kind]) as daemon:
        uids = daemon.send(["spin 10", "await never", "await never", "spin 10"])
        daemon.wait_settled()
        letters = {each["uid"]: each for each in daemon.letters()}
        assert set(letters) == {uids[1], uids[2]}
        assert {each["errorClass"] for each in letters.values()} == {
            "streamqd.handlers.SoftTimeout"
        }
        assert all("0.3 s" in each["errorMessage"] for each in letters.values())
        assert all("in obey" in each["traceback"] for each in letters.values())
        assert all("streamqd/worker" not in each["traceback"] for each in letters.values())
        assert daemon.ledger.finished_uids(GROUP) == {uids[0], uids[3]}
        assert daemon.events("worker.crashed") == []


def test_hard_limit_charges_only_its_own_run(new_daemon: NewDaemon):
    settings = consumer(hard_timeout="1s", max_crashes=1)
    with new_daemon(consumer=settings, code=KINDS["threads"]) as daemon:
        (stuck,) = daemon.send(["hold"])
        daemon.wait_run(stuck)
        others = daemon.send(["await go"] * 3)
        for uid in others:
            daemon.wait_run(uid)
        daemon.wait_event("worker.crashed")
        (daemon.folder / "go").touch()
        daemon.wait_settled()
        (letter,) = daemon.letters()
        assert (letter["uid"], letter["reason"]) == (stuck, "crashes")
        assert daemon.ledger.finished_uids(GROUP) == set(others)
        assert daemon.ledger.audit(GROUP).lost == [stuck]


@each_kind
def test_released_message_runs_again_without_an_attempt(new_daemon: NewDaemon, kind: str):
    with new_daemon(consumer=consumer(), code=KINDS[kind]) as daemon:
        uids = daemon.send(["spin 10", "release", "spin 10"])
        daemon.wait_settled()
        runs = daemon.ledger.records_for(uids[1], "start")
        assert [each.attempt for each in runs] == [1, 1]
        assert daemon.ledger.audit(GROUP) == Audit(repeated={uids[1]: 2})
        assert all(later.at - earlier.at > 0.5 for earlier, later in pairwise(runs))
        assert (daemon.letters(), daemon.traces()) == ([], [])


AGAIN_ONCE = """
from streamqd import Message, Retry
from tests.support.ledger import Ledger

ledger = Ledger.from_environment("1", durable=False)  # syncing 36,000 runs would block the loop

async def obey(message: Message) -> None:
    if message.text() == "again" and message.attempt == 1:
        raise Retry(after=0.01)
    with ledger.run(message):
        pass
"""


@pytest.mark.slow
def test_busy_worker_killed_60_times_never_stops_the_daemon(new_daemon: NewDaemon):
    """The next worker can take over the slot table in any state in which a kill has left it."""
    dice = random.Random(1)
    restart = {"crash_backoff": FAST, "crash_loop": 1000}
    settings = consumer(concurrency=128)
    with new_daemon(consumer=settings, daemon=restart, code=AGAIN_ONCE) as daemon:
        sent: list[str] = []

        def send() -> None:
            sent.extend(daemon.send([dice.choice(["again", "once"]) for _ in range(600)]))

        def is_busy(least: int) -> bool:
            if daemon.unsettled() == 0:
                send()  # all were handled between two checks
            return daemon.pending() >= least

        for _ in range(60):
            mark = daemon.mark()
            send()
            daemon.wait_for(partial(is_busy, dice.randrange(1, 300)), what="it is busy", every=0.0)
            os.kill(daemon.pids()[0], signal.SIGKILL)
            daemon.wait_event("worker.crashed", after=mark)
            daemon.wait_event("worker.ready", after=mark)
        daemon.wait_settled(60)
        assert daemon.running
        assert {each.uid for each in daemon.ledger.since(0) if each.kind == "end"} >= {*sent}
        assert daemon.letters() == []


PRODUCING = """
from streamqd import Producer, config

producer = Producer(settings=config.load({config!r}))

def obey(message: Message) -> None:
    with ledger.run(message):
        for number in range(10):
            producer.send("others", f"{{message.uid}} {{number}}", key=message.uid)
"""


def test_handler_threads_share_one_producer(new_daemon: NewDaemon):
    """Runs in four threads share the producer of their module, and send each message once."""
    daemon = new_daemon(consumer=consumer(concurrency=4))
    code = COMMON + PRODUCING.format(config=str(daemon.config_path))
    daemon.write_code(code)
    with daemon:
        uids = daemon.send(["ok"] * 200)
        daemon.wait_settled(60)
        assert {each.attempt for each in daemon.ledger.records("start")} == {1}
        assert daemon.letters() == []
        rows = daemon.link.execute("XRANGE", daemon.keys.stream("others", 0), "-", "+")
        texts = [fields[fields.index(b"payload") + 1].decode() for _, fields in rows]
        wanted = [f"{uid} {number}" for uid in uids for number in range(10)]
        assert sorted(texts) == sorted(wanted)
        assert daemon.stop() == 0
