"""A program in a terminal: a pty, with just enough of a screen to read the program's output.

The screen understands the sequences that `streamqd top` writes: text, line ends, moving the cursor
to the upper left, erasing, attributes, and screen modes. Any other sequence is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


def _as_shell(command: list[str], env: dict[str, str], told: int) -> NoReturn:
    """Run a command in the foreground, as a shell does, so that the command can be stopped.

    Ctrl-Z never stops a process group that has no parent in its session.
    """
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        ours = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, ours)
        os.write(told, str(os.getpid()).encode())
        os.close(told)
        os.execvpe(command[0], command, env)
    os.close(told)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


class Terminal:
    """A program in its own terminal. `shown` is the screen that a person would see."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        lines: int = 24,
        cwd: Path,
        env: Mapping[str, str],
    ) -> None:
        self.columns, self.lines = columns, lines
        self.raw = ""
        self.frames = 0  # number of whole frames written so far
        self.modes: set[str] = set()  # private modes that are switched on
        self.code: int | None = None
        self._unread = b""
        self._whole = ""  # the screen as it was before the frame in progress
        self._cells = [[" "] * columns for _ in range(lines)]
        self._at = (0, 0)
        tell, told = os.pipe()
        self._shell, self._master = pty.fork()
        if not self._shell:
            os.chdir(cwd)
            _as_shell(list(command), dict(env), told)
        os.close(told)
        self.pid = int(os.read(tell, 20))
        os.close(tell)
        self.resize(columns, lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self._shell, 0)
        os.close(self._master)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal, as dragging the corner of its window does."""
        self.columns, self.lines = columns, lines
        self._cells = [[" "] * columns for _ in range(lines)]
        self._at = (min(self._at[0], lines - 1), 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program."""
        os.kill(self.pid, number)

    @property
    def echoes(self) -> bool:
        """True if the terminal echoes typed text and waits for whole lines."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO) and bool(
            termios.tcgetattr(self._master)[3] & termios.ICANON
        )

    @property
    def shown(self) -> str:
        """The text of the screen after the last whole frame."""
        return self._whole if "2026" in self.modes else self._text()

    def _text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self._cells)

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
        """Read the program's output until a condition is true."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout:g} s: {what}\n{self.shown}")
            if not self._read(0.05) and self.code is not None and not condition():
                raise AssertionError(
                    f"the program exited with {self.code} before: {what}\n{self.shown}"
                )

    def wait_text(self, text: str, timeout: float = 20.0) -> None:
        """Wait until the screen shows a text."""
        self.wait_for(lambda: text in self.shown, f"the screen shows {text!r}", timeout)

    def wait_end(self, timeout: float = 10.0) -> int:
        """Wait until the program exits. Return its exit code, as a shell reports it."""
        self.wait_for(lambda: self.code is not None, "it ends", timeout)
        while self._read(0.0):
            pass
        assert self.code is not None
        return self.code

    @property
    def stopped(self) -> bool:
        """True if the program is stopped, as after Ctrl-Z."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    # --- the screen ---

    def _read(self, seconds: float) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self._shell, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        readable, _, _ = select.select([self._master], [], [], seconds)
        if not readable:
            return False
        try:
            raw = os.read(self._master, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self._unread += raw
        # A read may end within a character or a sequence. Its first part then waits for the rest.
        text = self._unread.decode("utf-8", "ignore")
        begun = text.rfind("\x1b")
        whole = text if begun < 0 or _SEQUENCE.match(text, begun) else text[:begun]
        self._unread = self._unread[len(whole.encode()) :]
        self.raw += whole
        self._show(whole)
        return bool(raw)

    def _show(self, text: str) -> None:
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found:
                self._sequence(*found.groups())
                at = found.end()
                continue
            row, column = self._at
            match text[at]:
                case "\r":
                    self._at = (row, 0)
                case "\n":
                    self._at = (row + 1, column)
                    if row + 1 >= self.lines:
                        self._cells = [*self._cells[1:], [" "] * self.columns]
                        self._at = (self.lines - 1, column)
                case "\x1b":
                    raise AssertionError(f"an unknown sequence: {text[at : at + 8]!r}")
                case character:
                    # Without wrapping, excess characters overwrite the last column.
                    self._cells[row][min(column, self.columns - 1)] = character
                    self._at = (row, column + 1)
            at += 1

    def _sequence(self, private: str, numbers: str, final: str) -> None:
        if private:
            if final == "h":
                self._whole = self._text()
                self.modes.add(numbers)
            else:
                self.modes.discard(numbers)
                self.frames += numbers == "2026"
        elif final == "H":
            self._at = (0, 0)
        elif final == "J":
            self._cells = [[" "] * self.columns for _ in range(self.lines)]
        else:
            assert final == "m", f"an unknown sequence: {numbers}{final}"
