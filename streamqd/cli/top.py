"""`streamqd top`: watch the whole fleet live in a terminal.

The screen uses termios from the standard library, and a few escape sequences that every terminal
since the VT100 supports. Curses would add a terminal database and its own handling of signals and
resizing. rich cannot read keys (decision 0019). textual and blessed would each add an event loop
for a single command. A frame is a pure function of the data, so that it can be tested.

A thread reads from Redis, so that a Redis server that does not reply never delays the response to a
key or a resize. The main thread waits for keys, signals and new data, and paints the screen.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import click

from streamqd import config
from streamqd.admin import snapshot
from streamqd.admin.published import Fleet
from streamqd.admin.snapshot import FleetSnapshot
from streamqd.cli.arguments import DURATION, json_option
from streamqd.cli.command import connected
from streamqd.cli.output import emit, printable
from streamqd.cli.screen import input as keyboard
from streamqd.cli.screen.frame import ScreenOptions, count_table_rows, frame, select_visible
from streamqd.cli.screen.terminal import Terminal
from streamqd.cli.session import Session
from streamqd.errors import ConfigError, RedisResponseError, RedisUnavailableError
from streamqd.store.client import Connection, connect
from streamqd.store.store import Store

INTERVAL_MIN = 0.2
READ_TIMEOUT = 3.0  # seconds per round trip to Redis
ESCAPE_SECONDS = 0.1  # seconds to wait for the rest of an escape sequence
WIDTH_ELSEWHERE = 132  # width of --once in columns if there is no terminal


@click.command(short_help="Watch the fleet live.")
@click.option(
    "-i",
    "--interval",
    type=DURATION,
    default="2s",
    show_default=True,
    help="The refresh interval. Instances publish new figures every 2 seconds.",
)
@click.option("--once", is_flag=True, help="Print all partitions once as text, and exit.")
@json_option
@connected
def top(session: Session, *, interval: float, once: bool, as_json: bool) -> int | None:
    """Watch partitions, rates, lag, slow handlers and failures.

    Press q to quit, s to sort by the next column, / to filter, p or the arrows to scroll, space to
    freeze the display, and ? for an explanation of the columns. The command changes nothing. To
    disable colors, set NO_COLOR or pass --no-color.
    """
    if interval < INTERVAL_MIN:
        raise click.UsageError(f"--interval must be at least {INTERVAL_MIN:g}s")
    if once or as_json:
        seen = snapshot.read_published(session.fleet)
        if as_json:
            emit(seen)
            return None
        width = shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns
        for line in frame(seen, ScreenOptions(), width, None):
            click.echo("".join(cell.text for cell in line).rstrip())
        return None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal; pass --once or --json to run it without one")
    return TopScreen(session, Terminal(color=session.colored), interval).run()


class TopScreen:
    """The live screen. A thread reads the fleet, while the main loop paints and handles keys."""

    def __init__(self, session: Session, terminal: Terminal, interval: float) -> None:
        self._terminal = terminal
        self._reader = TopReader(session, interval, terminal.wake)
        self._chosen = ScreenOptions()
        self._frozen: FleetSnapshot | None = None
        self._unparsed = b""  # the start of an incomplete escape sequence
        self._code: int | None = None

    def run(self) -> int:
        """Show the screen until a key or a signal stops it, and return the exit code.

        Raises KeyboardInterrupt at Ctrl-C.
        """
        with self._terminal.taken():
            self._reader.start()
            while self._code is None:
                self._paint()
                # Wait no longer than 1 s, because the ages on the screen grow even if Redis does
                # not reply.
                try:
                    typed = self._terminal.wait(ESCAPE_SECONDS if self._unparsed else 1.0)
                except EOFError:
                    return 128 + signal.SIGHUP
                self._type(typed)
                for number in self._terminal.signals():
                    self._handle_signal(number)
            self._reader.stop()
        if self._code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        return self._code

    def _paint(self) -> None:
        view, error, old = self._reader.latest()
        if self._chosen.frozen:
            view = self._frozen
        width, height = self._terminal.size()
        rows = len(select_visible(view, self._chosen)) if view else 0
        last = max(0, rows - count_table_rows(view, width, height, error))
        if self._chosen.top > last:
            self._chosen = replace(self._chosen, top=last)
        self._terminal.paint(
            frame(view, self._chosen, width, height, error=printable(error), old=old)
        )

    def _type(self, typed: bytes) -> None:
        if self._unparsed and not typed:
            found, self._unparsed = keyboard.flush(self._unparsed), b""
        else:
            found, self._unparsed = keyboard.keys(self._unparsed + typed)
        for key in found:
            view = self._frozen if self._chosen.frozen else self._reader.latest()[0]
            rows = len(select_visible(view, self._chosen)) if view else 0
            room = count_table_rows(view, *self._terminal.size(), self._reader.latest()[1])
            after = keyboard.handle_key(self._chosen, key, rows=rows, room=room)
            if after is None:
                self._code = 0
                return
            if after.frozen and not self._chosen.frozen:
                self._frozen = view
            self._chosen = after

    def _handle_signal(self, number: signal.Signals) -> None:
        match number:
            case signal.SIGTSTP:
                self._terminal.suspend()
            case signal.SIGCONT:
                # The process may have been stopped by SIGSTOP, which cannot be handled, and the
                # shell has changed the terminal in the meantime.
                self._terminal.enter()
            case signal.SIGTERM | signal.SIGHUP | signal.SIGINT:
                self._code = 128 + number


class TopReader:
    """Reads the fleet every `interval` seconds in a separate thread, over its own connection."""

    def __init__(self, session: Session, interval: float, wake: Callable[[], None]) -> None:
        self._session = session
        self._interval = interval
        self._wake = wake
        self._view: FleetSnapshot | None = None
        self._at = time.monotonic()
        self._error = ""
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread. It does not keep the process alive."""
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread, without waiting for a read in progress."""
        self._stop.set()

    def latest(self) -> tuple[FleetSnapshot | None, str, float]:
        """Return the last view, the reason why it is outdated, and its age in seconds.

        The view is None before the first read. The reason is '' if the view is up to date.
        """
        return self._view, self._error, time.monotonic() - self._at

    def _run(self) -> None:
        daemon, keys = self._session.settings.daemon, self._session.keys
        link: Connection | None = None
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if link is None:
                    redis = config.resolve_url(self._session.settings).redis
                    link = connect(redis, timeout=READ_TIMEOUT, name="streamqd:top")
                self._view = snapshot.read_published(
                    Fleet(Store(link, keys), daemon.fleet, daemon.lease_ttl)
                )
                self._at, self._error = time.monotonic(), ""
            except RedisUnavailableError as error:
                self._error = str(self._session.explain(error))
            except ConfigError as error:
                self._error = str(error)
            except RedisResponseError as error:
                self._error = f"Redis rejected the request: {error}"
            self._wake()
            self._stop.wait(max(INTERVAL_MIN / 2, self._interval - (time.monotonic() - began)))
        if link is not None:
            link.close()
