"""`--reload`: a child process watches the files of the user's code and reports changes.

It compares the time, size and inode of each file every `SCAN_INTERVAL_SECONDS`, which works on all
file systems and through symbolic links. The child need not import the code to find it, because the
process that validates each reload reports the files. After a change, the supervisor reloads as it
does after SIGHUP.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from streamqd import logs, process
from streamqd.process import Child

SCAN_INTERVAL_SECONDS = 0.1
RESTART_SECONDS = 1.0
MESSAGE_BYTES_MAX = 65_536

Signature = tuple[int, int, int] | None  # None if the file does not exist


class Edits:
    """Finds edited files by comparing their times, sizes and inodes with the previous check."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._known: dict[str, Signature] = {}
        self._last: dict[str, Signature] = {}

    def watch(self, files: Iterable[str], folders: Iterable[str], since_unix_ns: int) -> None:
        """Also watch these files, and all Python modules in these directories.

        `since_unix_ns` is the time at which the supervisor read them. A file that has changed since
        then counts as edited.
        """
        self._files |= set(files)
        self._folders |= set(folders)
        for file, found in self._read_signatures().items():
            if file not in self._known:
                fresh = found is None or found[0] <= since_unix_ns
                self._known[file] = found if fresh else None
        self._last = dict(self._known)

    def find_change(self) -> str:
        """Return a file that has changed since the last call that returned one, or ''.

        A change is reported only if nothing has changed between two calls, so that no file is
        loaded while an editor is still writing or renaming it.
        """
        now = self._read_signatures()
        settled, self._last = now == self._last, now
        if not settled:
            return ""
        changed = [
            file
            for file in sorted(now.keys() | self._known)
            if now.get(file) != self._known.get(file)
        ]
        self._known = now
        return changed[0] if changed else ""

    def _read_signatures(self) -> dict[str, Signature]:
        found = {file: _signature(file) for file in self._files}
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    names = [each.path for each in entries if _is_module(each.name)]
            except OSError:
                continue  # the file may reappear
            found |= {file: _signature(file) for file in names}
        return found


def _is_module(name: str) -> bool:
    # Editors keep drafts and locks in hidden files.
    return name.endswith(".py") and not name.startswith(".")


def _signature(file: str) -> Signature:
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Watched(NamedTuple):
    """The files of the user's code, and a time (unix ns) before the supervisor read them."""

    sources: list[str]
    since_unix_ns: int


class Watcher:
    """Runs the child process that watches for edits, and receives its reports.

    If the child exits, its replacement also reports edits that were made while no child was
    running.
    """

    def __init__(self, config: str, watched: Watched, forget: Iterable[Callable[[], None]]) -> None:
        self._config = str(Path(config).absolute())
        self._forget = list(forget)
        self._folders: set[str] = set()
        self._since_unix_ns = watched.since_unix_ns
        self._start_at = 0.0
        self.child: Child | None = None
        self.watch(watched.sources, watched.since_unix_ns)

    def watch(self, sources: Iterable[str], since_unix_ns: int) -> None:
        """Also watch the directories of these files, which were read after `since_unix_ns`."""
        new = {str(Path(source).parent) for source in sources} - self._folders
        self._folders |= new
        if self.child is not None and new:
            self.child.send(json.dumps([sorted(new), since_unix_ns]).encode())

    def tick(self, now: float) -> bool:
        """Start the child if it is not running. Return True if it has reported a changed file."""
        if self.child is None:
            if now >= self._start_at:
                self._start(now)
            return False
        file = self._read_reported()
        if file:
            logs.event("reload.edited", file=file)
            self._since_unix_ns = time.time_ns()
        if self.child.reap() is not None:
            self.child = None
            self._start_at = now + RESTART_SECONDS
        return bool(file)

    def close(self) -> None:
        """Kill the child, if it is running."""
        if self.child is not None:
            self.child.kill_group()

    def _read_reported(self) -> str:
        """Return the last file that the child has reported, or ''."""
        assert self.child is not None
        file = ""
        while True:
            try:
                message = self.child.control.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except OSError:
                return file
            if not message:
                return file
            file = message.decode("utf-8", "replace")

    def _start(self, now: float) -> None:
        edits, config = Edits(), self._config
        folders, since = sorted(self._folders), self._since_unix_ns

        def run(control: socket.socket) -> int:
            logs.set_role("watcher")
            edits.watch([config], folders, since)
            return _serve(edits, control)

        try:
            self.child = process.spawn(run, title="streamqd: watcher", forget=self._forget)
        except OSError:
            self._start_at = now + RESTART_SECONDS


def _serve(edits: Edits, control: socket.socket) -> int:
    while True:
        if process.wait_readable([control.fileno()], SCAN_INTERVAL_SECONDS):
            message = control.recv(MESSAGE_BYTES_MAX)
            if not message:
                return 0  # the supervisor has exited
            folders, since = json.loads(message)
            edits.watch([], folders, since)
        file = edits.find_change()
        if file:
            control.send(file.encode()[:MESSAGE_BYTES_MAX])
