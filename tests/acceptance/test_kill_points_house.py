"""The kill-point matrix of whoever has no lease: housekeeper, commands, producers.

What they do is atomic and right whoever does it, twice or late; so a fault costs nothing at all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from streamqd import config
from streamqd.producer import Producer
from streamqd.registration import ensure_topics
from streamqd.store import scripts
from streamqd.store.client import Link
from tests.support import crash_points, kill_houses
from tests.support.crash_points import PRODUCER, SCRIPTS, Strikes
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.kill_houses import PATIENCE, POINTS, UNIT, House
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer, Server

NewHouses = Callable[[int], list[House]]
NewDesks = Callable[[str], "list[Desk]"]
COMMANDS = [f"{name}-{side}" for name in SCRIPTS["command"] for side in ("calls", "called")]
OTHER = "elsewhere"


@pytest.fixture
def new_houses(server: Server, link: Link, tmp_path: Path) -> Iterator[NewHouses]:
    """Make houses, on an empty server."""
    with ExitStack() as stack:

        def make(count: int) -> list[House]:
            link.execute("FLUSHALL")
            made = [House(tmp_path / str(n), f"{server.url}?db={n}") for n in range(count)]
            for house in made:
                stack.callback(house.close)
            return made

        yield make


@pytest.mark.fault("F1")
def test_a_housekeeper_that_is_killed_at_any_point(new_houses: NewHouses):
    points = [point for point in POINTS if not point.endswith("-calls")]
    kill_houses.run_killed(new_houses(len(points)), points)


@pytest.mark.fault("F8")
def test_an_instance_whose_housekeeper_stands_still_at_any_point_and_comes_back(
    new_houses: NewHouses,
):
    points = [point for point in POINTS if point.endswith("-calls")]
    kill_houses.run_paused(new_houses(len(points)), points)


def lose_replies(proxy: FaultProxy, names: tuple[str, ...]) -> list[Callable[[], bool]]:
    """Lose the first reply to each of these scripts. Returns what tells whether that happened."""
    by_sha = {script.sha.encode(): script for script in scripts.load().values()}

    def is_call(words: list[bytes], name: str) -> bool:
        return words[0] == b"EVALSHA" and name == crash_points.name_of(by_sha[words[1]], words[3:])

    triggers = [
        proxy.arm(Fault.DROP_REPLY, wanted=lambda words, name=name: is_call(words, name))
        for name in names
    ]
    return [lambda trigger=trigger: trigger.hit for trigger in triggers]


def teach(link: Link) -> None:
    """Let the server know all scripts, so that the first call of each is executed."""
    for script in scripts.load().values():
        link.execute("SCRIPT", "LOAD", script.source)


@pytest.mark.fault("F12")
def test_any_reply_to_a_housekeeper_is_lost(fresh_server: ProcessServer, tmp_path: Path):
    with FaultProxy(fresh_server.socket_path) as proxy:
        house = House(tmp_path / "house", proxy.url)
        try:
            teach(house.one.link)
            hits = lose_replies(proxy, SCRIPTS["housekeeper"])
            house.one.start()
            house.verdict()
            # Some of what it does it does every 30 seconds.
            house.one.wait_for(
                lambda: all(hit() for hit in hits), timeout=60.0, what="every reply was lost"
            )
            house.verdict()
            assert house.one.stop() == 0
        finally:
            house.close()


# --- commands -------------------------------------------------------------------------------------


class Desk:
    """Letters that a command moves or deletes, in a database of its own."""

    def __init__(self, folder: Path, url: str, point: str) -> None:
        folder.mkdir()
        self.point = point
        self.strikes = Strikes(folder / "strikes")
        self.daemon = Daemon(folder, url)
        ensure_topics(self.daemon.link, config.load(self.daemon.config_path))
        with Producer(settings=config.load(self.daemon.config_path)) as producer:
            producer.send(OTHER, "first", partition=0)
        for number in range(1, 4):
            self.daemon.link.execute(
                *("XADD", self.daemon.keys.dlq(TOPIC, 0), f"{number}-0", "payload", f"p{number}"),
                *("originalId", f"{number}-0", "group", GROUP, "reason", "attempts"),
            )
        if point.startswith("dead_replay"):
            self._verb = ["dlq", "replay", TOPIC, "--all", "--yes"]
            self._target = self.daemon.keys.retry_stream(*UNIT)
        elif point.startswith("dead_purge"):
            self._verb = ["dlq", "purge", TOPIC, "--all", "--yes"]
            self._target = ""
        else:
            self._verb = ["dlq", "replay", TOPIC, "--all", "--yes", "--to-topic", OTHER]
            self._target = self.daemon.keys.stream(OTHER, 0)

    def start(self) -> subprocess.Popen[bytes]:
        """Run the command."""
        return subprocess.Popen(
            [sys.executable, "-m", crash_points.__name__, "--config", "one.toml", *self._verb],
            cwd=self.daemon.folder,
            env=self.daemon._environment() | {crash_points.VARIABLE: str(self.strikes.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def arm(self, act: str) -> None:
        # The second letter: one has gone the whole way, another has not begun.
        after = 1 if self.point.startswith("dead_replay") else 0
        self.strikes.arm(self.point, 0, act, after)

    def struck(self) -> bool:
        return self.strikes.struck(self.point, 0) is not None

    def check(self) -> None:
        """No letter is left, and each is in the target once."""
        assert self.daemon.letters() == []
        if self._target:
            moved = self.daemon.link.execute("XRANGE", self._target, "-", "+")
            bodies = Counter(dict(zip(f[::2], f[1::2], strict=True))[b"payload"] for _, f in moved)
            bodies.pop(b"first", None)
            assert bodies == {b"p1": 1, b"p2": 1, b"p3": 1}, self.point


@pytest.fixture
def new_desks(server: Server, link: Link, tmp_path: Path) -> Iterator[NewDesks]:
    """Make a desk for each point of the commands that ends so."""
    with ExitStack() as stack:

        def make(side: str) -> list[Desk]:
            points = [point for point in COMMANDS if point.endswith(side)]
            made = [
                Desk(tmp_path / each, f"{server.url}?db={n}", each) for n, each in enumerate(points)
            ]
            for desk in made:
                stack.callback(desk.daemon.close)
            return made

        yield make


def test_a_command_that_is_killed_once_it_is_answered_and_given_again(new_desks: NewDesks):
    desks = new_desks("-called")
    for desk in desks:
        desk.arm("KILL")
    for process in [desk.start() for desk in desks]:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    for process in [desk.start() for desk in desks]:
        assert process.wait(PATIENCE) == 0
    for desk in desks:
        desk.check()


def test_a_command_that_stands_still_before_it_asks_while_it_is_given_again(new_desks: NewDesks):
    desks = new_desks("-calls")
    for desk in desks:
        desk.arm("STOP")
    paused = [desk.start() for desk in desks]
    for desk in desks:
        desk.daemon.wait_for(desk.struck, timeout=PATIENCE, what=f"{desk.point} has struck")
    for process in [desk.start() for desk in desks]:
        assert process.wait(PATIENCE) == 0
    for process in paused:
        process.send_signal(signal.SIGCONT)
        assert process.wait(PATIENCE) in (0, 8)
    for desk in desks:
        desk.check()


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", SCRIPTS["command"])
def test_a_reply_to_a_command_is_lost(fresh_server: ProcessServer, tmp_path: Path, name: str):
    with FaultProxy(fresh_server.socket_path) as proxy:
        desk = Desk(tmp_path / "desk", proxy.url, f"{name}-called")
        teach(desk.daemon.link)
        (hit,) = lose_replies(proxy, (name,))
        codes = [desk.start().wait(PATIENCE)]
        while codes[-1] == 4:  # Redis did not answer: it says so, and may be given again
            codes.append(desk.start().wait(PATIENCE))
        assert hit()
        assert codes[-1] == 0
        desk.check()
        desk.daemon.close()


# --- producers ------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A way to send. `again` is how often it is there when it was sent again after an answer."""

    options: dict[str, object]
    again: int


SENDS = [Send({}, 2), Send({"dedup_id": "d"}, 1), Send({"dedup_id": "d", "delay": 60.0}, 1)]


def send(settings: config.Settings, options: dict[str, object]) -> None:
    with Producer(settings=settings) as producer:
        producer.send(TOPIC, "x", partition=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("act", ["KILL", "STOP"])
@pytest.mark.parametrize("point", PRODUCER)
@pytest.mark.parametrize("way", SENDS, ids=["plain", "dedup", "delay"])
def test_a_producer_that_ends_or_stands_still_while_another_sends_the_same(
    new_daemon: Callable[..., Daemon], tmp_path: Path, way: Send, point: str, act: str
):
    daemon = new_daemon()
    settings = config.load(daemon.config_path)
    strikes = Strikes(tmp_path / "strikes")
    strikes.arm(point, "-", act)
    pid = os.fork()
    if not pid:
        os.environ[crash_points.VARIABLE] = str(strikes.folder)
        crash_points.place()
        send(settings, way.options)
        os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert strikes.struck(point, "-") == pid

    send(settings, way.options)

    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGCONT)
        assert os.waitpid(pid, 0)[1] == 0
    unsent = point == "publish-unsent" and act == "KILL"
    sent = daemon.link.execute("XLEN", daemon.keys.stream(TOPIC, 0))
    sent += daemon.link.execute("ZCARD", daemon.keys.scheduled(TOPIC, 0))
    assert sent == (1 if unsent else way.again)
