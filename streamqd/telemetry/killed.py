"""Export, in the housekeeper, the spans of runs whose process was killed.

The run file of a worker contains its running spans. The supervisor reports the exit of each worker
to the housekeeper, which adds the kind of exit to the spans, exports them, and deletes the file. A
span keeps its ID, because libraries in the handler may already have exported child spans of it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamqd import logs
from streamqd.config import Settings
from streamqd.telemetry import run_file

PREFIX = b"exited "  # starts the supervisor's messages about exits
CHECK_INTERVAL_SECONDS = 5.0
HOWS_MAX = 1024  # exits that are stored until their files are exported
KEPT_SECONDS = 3600.0  # seconds that a file is kept while the collector does not answer
UNKNOWN = "process_lost"  # error.type of a run if the kind of exit is unknown


def exit_message(pid: int, kind: str, how: str) -> bytes:
    """Return the message that reports a worker's exit.

    `kind` becomes the `error.type` of the worker's spans.
    """
    return PREFIX + json.dumps([pid, kind, how[:100]]).encode()


class KilledRuns:
    """Finds the run files of dead workers, and exports their spans in a separate thread."""

    def __init__(self, settings: Settings) -> None:
        self._instance = settings.daemon.instance
        self._state_dir = settings.daemon.state_dir
        self._exits: dict[int, tuple[str, str]] = {}
        self._seen: dict[Path, float] = {}  # files, each with the time at which it was first found
        self._worker: threading.Thread | None = None
        self._export: Callable[[list[dict[str, Any]], str, str], bool] | None = None
        self._episode = logs.Episode("telemetry.failed", "telemetry.recovered")

    def note(self, message: bytes) -> None:
        """Remember how a worker exited, as a message from the supervisor reports."""
        pid, kind, how = json.loads(message.removeprefix(PREFIX))
        while len(self._exits) >= HOWS_MAX:
            # The export thread may have removed the entry in the meantime.
            self._exits.pop(next(iter(self._exits)), None)
        self._exits[pid] = kind, how

    def run(self) -> None:
        """Find the files of dead workers, and start to export their spans. Returns immediately.

        A file whose exit is not known yet is exported only at the next call, because the
        supervisor's message may still arrive.
        """
        if self._worker is not None and self._worker.is_alive():
            return
        now, seen = time.monotonic(), self._seen
        found = list(run_file.files_of_dead(self._state_dir, self._instance))
        ready = [each for each in found if each[0] in self._exits or each[1] in seen]
        self._seen = {path: seen.get(path, now) for _, path in found}
        if ready:
            # The collector may take seconds to answer, so a separate thread waits for it and not
            # the housekeeper.
            self._worker = threading.Thread(
                target=self._export_ready, args=(ready,), name="killed runs", daemon=True
            )
            self._worker.start()

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for an export that is running."""
        if self._worker is not None:
            self._worker.join(seconds)

    def _export_ready(self, ready: list[tuple[int, Path]]) -> None:
        problem = ""
        for pid, path in ready:
            try:
                self._export_file(pid, path)
            except FileNotFoundError:
                continue  # the worker removed the file when it exited
            except Exception as error:  # noqa: BLE001 - a damaged file must not stop the others
                problem = f"{path.name}: {type(error).__name__}: {error}"
                if isinstance(error, run_file.RunFileError) or self._is_old(path):
                    with contextlib.suppress(OSError):
                        path.unlink()
        if problem:
            self._episode.log_failure(error=problem)
        elif ready:
            self._episode.log_recovery()

    def _export_file(self, pid: int, path: Path) -> None:
        """Export the spans in a file, and then delete the file."""
        records = run_file.read(path)
        if records and not self._export_records(records, *self._exits.get(pid, (UNKNOWN, ""))):
            raise ConnectionError("the collector did not accept its spans")
        path.unlink()
        self._exits.pop(pid, None)

    def _is_old(self, path: Path) -> bool:
        return time.monotonic() - self._seen.get(path, time.monotonic()) > KEPT_SECONDS

    def _export_records(self, records: list[dict[str, Any]], kind: str, how: str) -> bool:
        if self._export is None:
            from streamqd.telemetry.killed_export import exporting

            self._export = exporting(self._instance)
        return self._export(records, kind, how)
