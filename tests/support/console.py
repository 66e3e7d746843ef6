"""The console as a process, and Debian's chromium to view it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

import pytest

from streamqd import process
from tests.support.daemon import ROOT, Daemon
from tests.support.waiting import wait_until

CHROMIUM = Path(os.environ.get("STREAMQD_CHROMIUM", "/usr/bin/chromium"))
CHROMIUM_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
NO_BROWSER = pytest.mark.skipif(
    not CHROMIUM.exists() and os.environ.get("STREAMQD_TEST_ALL") != "1",
    reason=f"no browser: {CHROMIUM} is not installed",
)
START_SECONDS = 30.0
EVENTS = 10  # number of events of a live page during which commands are counted


class ConsoleProcess:
    """A `streamqd console` process with a configuration file.

    `url` is its address without the token.
    """

    def __init__(self, config_path: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "streamqd", "--config", str(config_path), "console"]
        clean = {name: text for name, text in os.environ.items() if not name.startswith("STREAMQ_")}
        parent = os.getpid()
        self.log_path = config_path.parent / "console.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *arguments],
                cwd=config_path.parent,
                env=clean | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=lambda: process.die_with_parent(parent),
            )
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        self.first_line = self._line()
        timer.cancel()
        timer.join()
        found = re.fullmatch(r"console: (http://\S+)", self.first_line)
        assert found, f"{self.first_line!r}\n{self.log_path.read_text()}"
        self.link = found[1]
        self.url = self.link.partition("?")[0]
        self.port = urlsplit(self.url).port

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def next_link(self) -> str:
        """Return the link that the console prints after the previous link was used."""
        return self._line().removeprefix("console: ")

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 15.0) -> int:
        """Send a signal, wait for the exit, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def close(self) -> None:
        """Kill the process if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class Seen:
    """Records the requests, errors, dialogs and policy violations of a page as they happen."""

    def __init__(self, page: Any) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self._page = page
        self._listeners = {
            "request": lambda each: self.requests.append(each.url),
            "pageerror": lambda each: self.errors.append(str(each)),
            "console": self._message,  # chromium also writes violations to the console
            "dialog": self._dialog,
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def close(self) -> None:
        """Stop observing the page."""
        for event, listener in self._listeners.items():
            self._page.remove_listener(event, listener)

    def _message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


class LiveReader:
    """A thread that reads the stream of an open page, as any of 50 browsers would."""

    def __init__(self, console: ConsoleProcess, cookie: str, page: str = "/") -> None:
        self.parts = 0
        self._link = http.client.HTTPConnection("127.0.0.1", console.port, timeout=60)
        self._link.request("GET", f"/live?page={quote(page, '')}", headers={"Cookie": cookie})
        self._answer = self._link.getresponse()
        assert self._answer.status == 200
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while line := self._answer.readline():
                self.parts += line.startswith(b"event: ")
        except (OSError, ValueError, AttributeError):
            pass

    def close(self) -> None:
        self._link.sock and self._link.sock.shutdown(2)
        self._thread.join()
        self._link.close()


class CommandRates(NamedTuple):
    """The commands that consoles send to Redis: in the median event of a page, and per second.

    Some facts are read every ten seconds, so the median event on an idle machine contains no such
    read. On a busy machine, each event takes longer and contains more of them, but there are fewer
    events per second. Additional pages cost more only if both rates are higher.
    """

    per_event: float
    per_second: float

    def ratio(self, other: CommandRates) -> float:
        """Return the ratio of these rates to another pair. Of both ratios, the lower one counts."""
        return min(mine / theirs for mine, theirs in zip(self, other, strict=True))


def command_rates(
    daemon: Daemon, console: ConsoleProcess, cookie: str, pages: list[str]
) -> CommandRates:
    """Count the commands during EVENTS events while a browser shows each of the pages."""
    readers = [LiveReader(console, cookie, page) for page in pages]
    first, *_ = readers
    try:
        wait_until(lambda: all(each.parts for each in readers), timeout=60)
        goals = [each.parts + EVENTS for each in readers]
        sent, parts, since = [commands_sent(daemon)], first.parts, time.monotonic()
        per_event = []
        for _ in range(EVENTS):
            wait_until(lambda seen=parts: first.parts > seen, timeout=120)
            sent.append(commands_sent(daemon))
            events, parts = first.parts - parts, first.parts
            per_event.append((sent[-1] - sent[-2]) / events)
        per_second = (sent[-1] - sent[0]) / (time.monotonic() - since)
        pairs = list(zip(readers, goals, strict=True))
        wait_until(lambda: all(each.parts >= goal for each, goal in pairs), timeout=120)
        # On a busy machine, most events can repeat an older snapshot, and cost no commands.
        return CommandRates(statistics.median(each for each in per_event if each), per_second)
    finally:
        for each in readers:
            each.close()


def commands_sent(daemon: Daemon) -> int:
    """Return the number of commands that the consoles' connections have sent."""
    rows = daemon.link.execute("CLIENT", "LIST").decode().splitlines()
    fields = [dict(each.split("=", 1) for each in row.split(" ") if "=" in each) for row in rows]
    return sum(int(each["tot-cmds"]) for each in fields if each["name"] == "streamqd:console")
