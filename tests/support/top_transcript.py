"""Write docs/internals/transcripts/top.md: `streamqd top` in a terminal, on a real daemon.

    python -m tests.support.top_transcript [FILE]

There are three scenes: a working daemon with failures and a handler that hangs, a wide screen with
a pause, and the same screen while Redis is unavailable.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path

from click.testing import CliRunner

from streamqd.cli import cli
from tests.support import servers
from tests.support.daemon import ROOT, TOPIC, Daemon
from tests.support.terminal import Terminal

PAGE = ROOT / "docs" / "internals" / "transcripts" / "top.md"
HEAD = """\
# The screen of `streamqd top`

This page shows the screen of `streamqd top` without colors. `tests/support/top_transcript.py`
starts the daemon, sends the messages and writes this page:
`python -m tests.support.top_transcript`. The [on-call
runbook](../../how-to/on-call-runbook.md) has the next questions.
"""


def load(daemon: Daemon, done: threading.Event) -> None:
    """Send messages, some of which fail, until `done` is set."""
    chance = random.Random(1)
    words = ["ok"] * 20 + ["sleep 0.02"] * 6 + ["fail", "dead"]
    while not done.wait(0.25):
        daemon.send(chance.choices(words, k=40))


def scenes(daemon: Daemon, server: servers.ProcessServer) -> list[tuple[str, str]]:
    """Play the scenes. Return the title and the screen of each scene."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("STREAMQ_")}
    top = Terminal(
        [sys.executable, "-m", "streamqd", "--config", str(daemon.config_path), "top"],
        cwd=daemon.folder,
        env=clean | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1"},
    )
    found = []
    done = threading.Event()
    sender = threading.Thread(target=load, args=(daemon, done))
    with top:
        sender.start()
        top.wait_text("ValueError")
        daemon.send(["await gate"], 3)
        top.wait_text("has been running one message")
        found.append(("80 columns, 24 lines: a handler hangs, others fail now and then", top.shown))
        CliRunner().invoke(
            cli,
            ["--config", str(daemon.config_path), "pause", TOPIC, "--reason", "new disk"],
        )
        top.resize(132, 30)
        top.wait_text("PAUSED")
        top.wait_text("pause of")
        done.set()
        sender.join()
        found.append(("132 columns, 30 lines: an operator has paused the topic", top.shown))
        top.resize(80, 24)
        server.kill()
        top.wait_text("REDIS UNAVAILABLE")
        found.append(("Redis is killed: the last figures stay, with their age", top.shown))
        top.type("q")
        top.wait_end()
    return found


def main(path: Path) -> None:
    """Write the page."""
    server = servers.start("valkey", aof=True)
    assert isinstance(server, servers.ProcessServer)
    with tempfile.TemporaryDirectory() as folder:
        consumer = {"max_attempts": 3, "backoff": {"base": "1s"}}
        daemon = Daemon(
            Path(folder), server.url, partitions=6, groups=["bill", "mail"], consumer=consumer,
            name="west-1",
        )  # fmt: skip
        with daemon:
            try:
                shown = scenes(daemon, server)
            finally:
                (Path(folder) / "gate").touch()
                daemon.signal(signal.SIGQUIT)
    server.close()
    parts = [
        f"\n## {what[0].upper()}{what[1:]}\n\n```text\n{_anonymous(screen)}\n```\n"
        for what, screen in shown
    ]
    path.write_text(HEAD + "".join(parts))


def _anonymous(screen: str) -> str:
    """Remove the names of this machine from a screen."""
    screen = re.sub(r"unix:///[\w/.-]+", "unix:///run/redis.sock", screen)
    return re.sub(r" by \S+@\S+?(?=[: ])", " by alice@west", screen)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE)
