"""Take the screenshots in docs/images from a live run: `make docs NAME=shots`.

    python -m tests.pages.shots [FOLDER]

Shows `streamqd top` in tmux, and the web console and the report in Chromium. A picture is skipped
with a note if its program is missing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.pages import console_shots
from tests.support import servers
from tests.support.daemon import ROOT, Daemon
from tests.support.top_transcript import load
from tests.support.waiting import wait_until

IMAGES = ROOT / "docs" / "images"
COLUMNS, LINES = 80, 24


def run(*command: str | Path, **env: str) -> str:
    """Run a command. Return its output."""
    words = [str(word) for word in command]
    whole = dict(os.environ) | env
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE, env=whole).stdout


def streamqd_command(daemon: Daemon, *arguments: str | Path) -> list[str]:
    """Return the arguments of a streamqd command for this daemon."""
    config = str(daemon.config_path)
    return [sys.executable, "-m", "streamqd", "--config", config, *map(str, arguments)]


def shoot_top(daemon: Daemon, picture: Path) -> None:
    """Draw the screen of `streamqd top` in color."""
    tmux = ["tmux", "-L", f"shots-{os.getpid()}"]
    command = shlex.join(streamqd_command(daemon, "top"))
    env = {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    run(*tmux, "-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES),
        "-e", f"PYTHONPATH={ROOT}", command, **env)  # fmt: skip
    try:
        wait_until(
            lambda: "has been running one message" in run(*tmux, "capture-pane", "-p"),
            timeout=40,
            what="top shows the handler that hangs",
        )
        screen = run(*tmux, "capture-pane", "-p", "-e").rstrip("\n")
    finally:
        run(*tmux, "kill-server")
    paper = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    paper.print(Text.from_ansi(screen))
    drawn = paper.export_svg(title="streamqd top", unique_id="top")
    # The drawing would fetch its font from the network by default. It uses a font of the reader
    # instead.
    drawn = re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)
    picture.write_text(drawn.replace("Fira Code", "DejaVu Sans Mono"))


def shoot_page(url: str, picture: Path, size: str) -> None:
    """Take a screenshot of a page in a headless browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"skipped, chromium is not installed: {picture.name}")
        return
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", f"--window-size={size}", f"--screenshot={picture}", url],
            check=True,
            stderr=subprocess.DEVNULL,  # hides complaints about a missing desktop
            timeout=120,
        )  # fmt: skip


def shoot_report(daemon: Daemon, picture: Path) -> None:
    """Create the report of the topic with Spark, and take a screenshot of it."""
    if shutil.which("java") is None:
        print(f"skipped, Java is not installed: {picture.name}")
        return
    folder = daemon.folder / "report"
    run(*streamqd_command(daemon, "pipeline", "report", "--out", folder), PYTHONPATH=str(ROOT))
    shoot_page((folder / "report.html").as_uri(), picture, "1000,850")


@contextmanager
def run_busy_daemon() -> Iterator[Daemon]:
    """Run a daemon that has some failures, and a handler that hangs."""
    server = servers.start("valkey", tcp=True)
    done = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(
            Path(folder), server.url, partitions=6, groups=["bill", "mail"], name="west-1",
            consumer={"max_attempts": 3, "backoff": {"base": "1s"}},
        )  # fmt: skip
        sender = threading.Thread(target=load, args=(daemon, done))
        with daemon:
            try:
                sender.start()
                daemon.send(["await gate"], 3)
                yield daemon
            finally:
                done.set()
                sender.join()
                (Path(folder) / "gate").touch()
                daemon.signal(signal.SIGQUIT)
    server.close()


def main(images: Path) -> None:
    """Take all screenshots."""
    images.mkdir(parents=True, exist_ok=True)
    with run_busy_daemon() as daemon:
        if shutil.which("tmux"):
            shoot_top(daemon, images / "top.svg")
        else:
            print("skipped, tmux is not installed: top.svg")
        shoot_report(daemon, images / "report.png")
    console_shots.main(images)
    for picture in sorted(images.iterdir()):
        size = picture.stat().st_size
        print(f"{picture.name}: {size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
