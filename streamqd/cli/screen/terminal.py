"""Control the modes and the size of the terminal, paint frames, and wait for keys and signals.

1. `enter` switches to the alternate screen, hides the cursor and reads single keys.
2. Each `paint` writes a whole frame with one write, so that the screen does not flicker.
3. `leave` restores the terminal, even after an exception.

Signal handlers only record the signal. The loop that calls `wait` handles it later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from streamqd import process
from streamqd.cli.screen.columns import Cell

# Switch to the alternate screen, hide the cursor, and disable wrapping, because a character in the
# last column must not scroll the screen.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
# With synchronized output, a terminal shows a frame only when it is complete. Terminals that do not
# support it ignore these sequences.
_BEGIN, _END = "\x1b[?2026h\x1b[H", "\x1b[?2026l"
_PLAIN = {"head": "\x1b[7m", "bold": "\x1b[1m"}
_COLORS = _PLAIN | {
    "dim": "\x1b[2m",
    "warn": "\x1b[33m",
    "bad": "\x1b[1;31m",
    "good": "\x1b[32m",
}
_MONOCHROME = _PLAIN | {"bad": "\x1b[1m", "warn": "\x1b[1m"}

SIGNALS = (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTSTP)


class Terminal:
    """The terminal on standard input and output, for use by the main thread."""

    def __init__(self, *, color: bool) -> None:
        self._styles = _COLORS if color else _MONOCHROME
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._before: list[Any] | None = None
        self._noted: list[signal.Signals] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Use the terminal for the block, and restore it afterwards, even after an exception."""
        handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCONT)}
        for number in handlers:
            signal.signal(number, self._note)
        try:
            self.enter()
            yield
        finally:
            self.leave()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def enter(self) -> None:
        """Switch the terminal to the live screen. This may be repeated."""
        if self._before is None:
            self._before = termios.tcgetattr(self._in)
        modes = termios.tcgetattr(self._in)
        # Read keys immediately, without echo. Ctrl-Z and Ctrl-C still send their signals.
        modes[3] &= ~(termios.ICANON | termios.ECHO)
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._in, termios.TCSANOW, modes)
        self._write(_ENTER)

    def leave(self) -> None:
        """Restore the terminal. This may be repeated."""
        before, self._before = self._before, None
        if before is None:
            return
        # A terminal that is closed does not have to be restored.
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._in, termios.TCSANOW, before)

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z does, and restore the terminal until it continues."""
        self.leave()
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self.enter()

    def size(self) -> tuple[int, int]:
        """Return the number of columns and lines, or 80 and 24 if they are unknown."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return found.columns or 80, found.lines or 24

    def paint(self, lines: Sequence[Sequence[Cell]]) -> None:
        """Show a frame that covers the whole screen."""
        # Do not erase to the end of the line, because a full line would lose its last character.
        self._write(_BEGIN + "\r\n".join(self.text(line) for line in lines) + _END)

    def text(self, line: Sequence[Cell]) -> str:
        """Return a line with the escape sequences of its styles."""
        return "".join(
            f"{self._styles[style]}{text}\x1b[0m" if style in self._styles else text
            for text, style in line
        )

    # --- waiting ---

    def wait(self, seconds: float) -> bytes:
        """Wait for keys, a signal or `wake`, and return the typed bytes.

        Raises EOFError if the terminal is closed.
        """
        ready = process.wait_readable([self._in, self._wake_read], seconds)
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._in not in ready:
            return b""
        try:
            raw = os.read(self._in, 1024)
        except OSError:
            raw = b""
        if not raw:
            raise EOFError
        return raw

    def wake(self) -> None:
        """Make `wait` return. Any thread may call this method."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    def signals(self) -> list[signal.Signals]:
        """Return the signals that arrived since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(signal.Signals(number))
        self.wake()

    def _write(self, text: str) -> None:
        raw = memoryview(text.encode("utf-8", "replace"))
        while raw:
            raw = raw[os.write(self._out, raw) :]
