"""The daemon's log lines in this process, for tests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Any

from streamqd import logs


class LogLines:
    """Captures the daemon's log lines while it is open. Restores the logger afterwards."""

    def __enter__(self) -> LogLines:
        logger = logging.getLogger("streamqd")
        self._before = logger.handlers[:], logger.level, logger.propagate
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._raw = b""
        logs.setup(role="test", style="json", level="debug", fd=self._writer)
        return self

    def __exit__(self, *_exception: object) -> None:
        logs.close()
        logger = logging.getLogger("streamqd")
        logger.handlers[:], logger.level, logger.propagate = self._before
        os.close(self._reader)
        os.close(self._writer)

    def all(self) -> list[dict[str, Any]]:
        """Return every line that was logged since the start."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reader, 1 << 20):
                self._raw += part
        return [json.loads(line) for line in self._raw.splitlines()]

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one event."""
        return [line for line in self.all() if line.get("event") == event]
