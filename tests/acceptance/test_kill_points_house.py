"""The kill-point matrix of processes without a lease: housekeeper, commands, producers.

Their actions are atomic. They are correct from any process, even if they are repeated or late, so a
fault costs nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from streamqd import config
from streamqd.producer import Producer
from streamqd.store import scripts
from streamqd.store.client import Connection
from tests.support import crash_points, kill_commands, kill_housekeepers
from tests.support.crash_points import PRODUCER, SCRIPTS, Strikes
from tests.support.daemon import TOPIC, Daemon
from tests.support.kill_commands import COMMANDS, CommandTrial
from tests.support.kill_housekeepers import PATIENCE, POINTS, HousekeeperTrial
from tests.support.proxy import Fault, FaultProxy
from tests.support.servers import ProcessServer, Server

NewHouses = Callable[[list[str]], list[HousekeeperTrial]]
NewTrials = Callable[[str], "list[CommandTrial]"]


@pytest.fixture
def new_housekeepers(server: Server, link: Connection, tmp_path: Path) -> Iterator[NewHouses]:
    """Create a house for each point, on an empty server."""
    with ExitStack() as stack:

        def make(points: list[str]) -> list[HousekeeperTrial]:
            link.execute("FLUSHALL")
            made = [
                HousekeeperTrial(tmp_path, f"{server.url}?db={n}", each)
                for n, each in enumerate(points)
            ]
            for housekeeper in made:
                stack.callback(housekeeper.close)
            return made

        yield make


@pytest.mark.fault("F1")
def test_housekeeper_killed_at_any_point_costs_nothing(new_housekeepers: NewHouses):
    kill_housekeepers.run_killed(
        new_housekeepers([each for each in POINTS if not each.endswith("-calls")])
    )


@pytest.mark.fault("F8")
def test_instance_paused_in_its_housekeeper_costs_nothing(
    new_housekeepers: NewHouses,
):
    kill_housekeepers.run_paused(
        new_housekeepers([each for each in POINTS if each.endswith("-calls")])
    )


def lose_replies(proxy: FaultProxy, names: tuple[str, ...]) -> list[Callable[[], bool]]:
    """Lose the first reply to each script.

    Return a function per script that reports if that has happened.
    """
    by_sha = {script.sha.encode(): script for script in scripts.load().values()}

    def is_call(words: list[bytes], name: str) -> bool:
        return words[0] == b"EVALSHA" and name == crash_points.point_name(
            by_sha[words[1]], words[3:]
        )

    triggers = [
        proxy.arm(Fault.DROP_REPLY, wanted=lambda words, name=name: is_call(words, name))
        for name in names
    ]
    return [lambda trigger=trigger: trigger.hit for trigger in triggers]


def load_scripts(link: Connection) -> None:
    """Load all scripts, so that the server executes even the first call of each script."""
    for script in scripts.load().values():
        link.execute("SCRIPT", "LOAD", script.source)


@pytest.mark.fault("F12")
def test_lost_reply_to_a_housekeeper_costs_nothing(fresh_server: ProcessServer, tmp_path: Path):
    with FaultProxy(fresh_server.socket_path) as proxy:
        housekeeper = HousekeeperTrial(tmp_path, proxy.url)
        try:
            load_scripts(housekeeper.one.link)
            hits = lose_replies(proxy, SCRIPTS["housekeeper"])
            housekeeper.one.start()
            housekeeper.verdict()
            housekeeper.one.wait_for(
                lambda: all(hit() for hit in hits), timeout=60.0, what="every reply was lost"
            )
            housekeeper.verdict()
            assert housekeeper.one.stop() == 0
        finally:
            housekeeper.close()


# --- commands -------------------------------------------------------------------------------------


@pytest.fixture
def new_trials(server: Server, link: Connection, tmp_path: Path) -> Iterator[NewTrials]:
    """Create a trial for each kill point of the commands whose names end with this suffix."""
    with ExitStack() as stack:

        def make(side: str) -> list[CommandTrial]:
            link.execute("FLUSHALL")
            points = [point for point in COMMANDS if point.endswith(side)]
            made = [
                CommandTrial(tmp_path, f"{server.url}?db={n}", each)
                for n, each in enumerate(points)
            ]
            for trial in made:
                stack.callback(trial.close)
            return made

        yield make


def test_command_killed_after_its_reply_can_be_repeated(new_trials: NewTrials):
    kill_commands.run_killed(new_trials("-called"))


def test_paused_command_can_be_repeated_before_it_resumes(new_trials: NewTrials):
    kill_commands.run_paused(new_trials("-calls"))


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", SCRIPTS["command"])
def test_command_with_a_lost_reply_can_be_repeated(
    fresh_server: ProcessServer, tmp_path: Path, name: str
):
    with FaultProxy(fresh_server.socket_path) as proxy:
        trial = CommandTrial(tmp_path, proxy.url, f"{name}-called")
        load_scripts(trial.daemon.link)
        (hit,) = lose_replies(proxy, (name,))
        codes = [trial.start().wait(PATIENCE)]
        while codes[-1] == 4:  # Redis did not answer, so the command may be repeated
            codes.append(trial.start().wait(PATIENCE))
        assert hit()
        assert codes[-1] == 0
        trial.check()
        trial.close()


# --- producers ------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A way to send a message.

    `again` is the number of copies if a send that was answered is repeated.
    """

    options: dict[str, object]
    again: int


SENDS = [Send({}, 2), Send({"dedup_id": "d"}, 1), Send({"dedup_id": "d", "delay": 60.0}, 1)]


def send(settings: config.Settings, options: dict[str, object]) -> None:
    with Producer(settings=settings) as producer:
        producer.send(TOPIC, "x", partition=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("act", ["KILL", "STOP"])
@pytest.mark.parametrize("point", PRODUCER)
@pytest.mark.parametrize("way", SENDS, ids=["plain", "dedup", "delay"])
def test_killed_or_paused_send_can_be_repeated(
    new_daemon: Callable[..., Daemon], tmp_path: Path, way: Send, point: str, act: str
):
    daemon = new_daemon()
    settings = config.load(daemon.config_path)
    strikes = Strikes(tmp_path / "strikes")
    strikes.arm(point, "-", act)
    pid = os.fork()
    if not pid:
        os.environ[crash_points.VARIABLE] = str(strikes.folder)
        crash_points.install()
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
    sent += daemon.link.execute("ZCARD", daemon.keys.delayed_sends(TOPIC, 0))
    assert sent == (1 if unsent else way.again)
