"""Commands that move or delete dead letters, struck in the middle and then run again.

However far the first run got, each dead letter ends up in its target exactly once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from streamqd import config
from streamqd.producer import Producer
from streamqd.registration import ensure_topics
from tests.support import crash_points
from tests.support.crash_points import SCRIPTS, Strikes
from tests.support.daemon import GROUP, TOPIC, Daemon
from tests.support.kill_housekeepers import ASSIGNMENT, PATIENCE

COMMANDS = [f"{name}-{side}" for name in SCRIPTS["command"] for side in ("calls", "called")]
OTHER = "elsewhere"


class CommandTrial:
    """A command that moves or deletes dead letters, in its own database."""

    def __init__(self, folder: Path, url: str, point: str) -> None:
        self.point = point
        folder /= point
        folder.mkdir()
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
            self._target = self.daemon.keys.retry_stream(*ASSIGNMENT)
        elif point.startswith("dead_purge"):
            self._verb = ["dlq", "purge", TOPIC, "--all", "--yes"]
            self._target = ""
        else:
            self._verb = ["dlq", "replay", TOPIC, "--all", "--yes", "--to-topic", OTHER]
            self._target = self.daemon.keys.stream(OTHER, 0)

    def close(self) -> None:
        self.daemon.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command."""
        return subprocess.Popen(
            [sys.executable, "-m", crash_points.__name__, "--config", "one.toml", *self._verb],
            cwd=self.daemon.folder,
            env=self.daemon._environment() | {crash_points.VARIABLE: str(self.strikes.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def arm(self, act: str) -> None:
        # The strike hits the second letter, so the first is finished and the third is untouched.
        after = 1 if self.point.startswith("dead_replay") else 0
        self.strikes.arm(self.point, 0, act, after)

    def struck(self) -> bool:
        return self.strikes.struck(self.point, 0) is not None

    def check(self) -> None:
        """Assert that no letter is left over, and that each is in the target once."""
        assert self.daemon.letters() == []
        if self._target:
            moved = self.daemon.link.execute("XRANGE", self._target, "-", "+")
            bodies = Counter(dict(zip(f[::2], f[1::2], strict=True))[b"payload"] for _, f in moved)
            bodies.pop(b"first", None)
            assert bodies == {b"p1": 1, b"p2": 1, b"p3": 1}, self.point


def run_killed(trials: list[CommandTrial]) -> None:
    """Kill each command at its point, and run it again."""
    for trial in trials:
        trial.arm("KILL")
    for process in [trial.start() for trial in trials]:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    for process in [trial.start() for trial in trials]:
        assert process.wait(PATIENCE) == 0
    for trial in trials:
        trial.check()


def run_paused(trials: list[CommandTrial]) -> None:
    """Stop each command at its point, run it again, and then resume the first run."""
    for trial in trials:
        trial.arm("STOP")
    paused = [trial.start() for trial in trials]
    for trial in trials:
        trial.daemon.wait_for(trial.struck, timeout=PATIENCE, what=f"{trial.point} has struck")
    for process in [trial.start() for trial in trials]:
        assert process.wait(PATIENCE) == 0
    for process in paused:
        process.send_signal(signal.SIGCONT)
        assert process.wait(PATIENCE) in (0, 8)
    for trial in trials:
        trial.check()
