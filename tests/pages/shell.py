"""A terminal that a test types into, and the comparison of its output with the expected lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

PROMPT = re.compile(r"<done (\d+)>\n")
# Patterns that differ from run to run, and their replacements. They are applied in this order.
VOLATILE = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"\b\d{13}(-\d+)?\b"), "<id>"),
    (re.compile(r"\b(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?Z?"), "<clock>"),
    (re.compile(r"\b(\d+(\.\d+)?(us|ms|s|m|h|d))+\b"), "<time>"),
    (re.compile(r"[ \t]+"), " "),
)


def normalize_line(line: str) -> str:
    """Return a line as it finally appears on the screen, without parts that differ between runs."""
    line = line.rstrip("\r").rpartition("\r")[2]
    for pattern, word in VOLATILE:
        line = pattern.sub(word, line)
    return line.strip()


def non_empty_lines(text: str) -> list[str]:
    """Return the lines of a text, but not the empty ones."""
    return [line for line in text.split("\n") if normalize_line(line)]


def matches(expected: list[str], printed: list[str]) -> bool:
    """Return True if the printed lines match the lines of a page."""
    if not expected:
        return not printed
    if expected[0].strip() == "…":
        return any(matches(expected[1:], printed[at:]) for at in range(len(printed) + 1))
    return (
        bool(printed)
        and matches_line(expected[0], printed[0])
        and matches(expected[1:], printed[1:])
    )


def matches_line(expected: str, printed: str) -> bool:
    """Return True if a printed line matches a line of a page."""
    parts = (re.escape(normalize_line(part)) for part in expected.split("…"))
    return re.fullmatch(r"\s*.*?\s*".join(parts), normalize_line(printed)) is not None


class Terminal:
    """A bash in a terminal of its own."""

    def __init__(self, folder: Path, env: Mapping[str, str], patience: float) -> None:
        self._patience = patience
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        modes = termios.tcgetattr(slave)
        modes[1] &= ~termios.ONLCR
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
        prompts = {"PS1": "<done $?>\n", "PS2": "", "TERM": "xterm", "NO_COLOR": "1"}
        self._bash = subprocess.Popen(
            command, cwd=folder, env={**env, **prompts}, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self._said = ""
        self._from = 0  # the output before this position belongs to earlier commands
        self.runs = True
        self.ended()

    @property
    def folder(self) -> Path:
        """The shell's current directory."""
        return Path(f"/proc/{self._bash.pid}/cwd").readlink()

    @property
    def new(self) -> str:
        """The output since the last commands were typed."""
        return self._said[self._from :]

    def run(self, command: str, answer: str = "") -> int:
        """Type a command and its answers, and wait until it exits. Return its exit code."""
        self.type(command + "\n" + (answer + "\n" if answer else ""))
        return self.ended()

    def type(self, text: str) -> None:
        """Type text, as if keys were pressed."""
        self.runs = True
        os.write(self._master, text.encode())

    def ended(self) -> int:
        """Wait until the command exits, and remove the prompt. Return the exit code."""
        self.wait(lambda: PROMPT.search(self.new), "a command ends")
        found = PROMPT.search(self._said, self._from)
        assert found is not None
        self._said = self._said[: found.start()] + self._said[found.end() :]
        self.runs = False
        return int(found[1])

    def take(self, expected: list[str]) -> None:
        """Wait for lines like these, and drop all output before the last of them."""

        def places() -> list[int]:
            lines, found = self.new.split("\n")[:-1], list[int]()
            for line in expected:
                at = (
                    n for n, each in enumerate(lines) if n not in found and matches_line(line, each)
                )
                found.append(next(at, -1))
            return [] if -1 in found else found

        self.wait(places, "\n".join(expected))
        self._from += len("\n".join(self.new.split("\n")[: max(places()) + 1])) + 1

    def forget(self) -> None:
        """Drop the output so far, so that `new` starts empty."""
        self._read(0.0)
        self._from = len(self._said)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Read the output until the condition is true."""
        deadline = time.monotonic() + self._patience
        while not condition():
            over = time.monotonic() > deadline or PROMPT.search(self.new)
            assert not over, f"it has not come, within {self._patience:g} s: {what}\n{self.new}"
            self._read(0.1)

    def _read(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            self._said += os.read(self._master, 1 << 16).decode(errors="replace")
            seconds = 0.0

    def close(self) -> None:
        """Stop the shell and its processes. Those that do not exit are killed with SIGKILL."""
        family = [psutil.Process(self._bash.pid)]
        family += family[0].children(recursive=True)
        for each in reversed(family):
            if each.is_running():
                each.kill()
        self._bash.wait()
        os.close(self._master)
