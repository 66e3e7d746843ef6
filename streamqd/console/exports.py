"""Exports of dead letters: files of any length, which are sent while the data is being read.

An export has its own thread and connection, so that it does not delay pages. If the browser cancels
the download, the export stops after its current chunk. If Redis becomes unavailable, the export
breaks off, and the browser reports a failed download.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from streamqd.admin import audit, dead_letters
from streamqd.admin.messages import MessageFilter
from streamqd.console.backend import Backend, TooBusyError
from streamqd.errors import StreamqdError

EXPORTS_MAX = 4  # exports that may run at the same time
CHUNK = 256  # lines that are sent together

_running = threading.BoundedSemaphore(EXPORTS_MAX)


class ExportFile:
    """The lines of one export from a topic. Except for `stop`, only one thread may use it."""

    def __init__(self, backend: Backend, topic: str, choice: MessageFilter, person: str) -> None:
        """Select the dead letters to export.

        Raises TopicNotFoundError and RequestRefusedError, and TooBusyError if too many exports are
        running.
        """
        if not _running.acquire(blocking=False):
            raise TooBusyError(f"{EXPORTS_MAX} exports are running; repeat this one later")
        self._person = person
        self._stopped = threading.Event()
        self._complete = False
        with contextlib.ExitStack() as opened:
            opened.callback(_running.release)
            store = opened.enter_context(backend.open_resources()).store
            self._export = dead_letters.Export(store, topic, choice, stop=self._stopped.is_set)
            self._opened = opened.pop_all()
        self._lines = self._export.lines()

    def chunk(self) -> bytes:
        """Return the next lines, or b'' after the last one. Raises RedisUnavailableError."""
        some = list(itertools.islice(self._lines, CHUNK))
        self._complete = not some and not self._stopped.is_set()
        return "".join(f"{line}\n" for line in some).encode()

    def stop(self) -> None:
        """Stop after the current chunk."""
        self._stopped.set()

    def close(self) -> None:
        """Write the entry in the audit log, and close the connection."""
        with self._opened, audit.acting_as(self._person):
            self._export.finish("console" if self._complete else "console: interrupted")


class ExportResponse(StreamingResponse):
    """The response that contains an export, and the thread that reads the dead letters."""

    def __init__(self, file: ExportFile, media_type: str, headers: dict[str, str]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, "console-export")
        super().__init__(self._chunks(), media_type=media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file. If an error occurs, the response breaks off."""
        try:
            with contextlib.suppress(StreamqdError):
                await super().__call__(scope, receive, send)
        finally:
            self._file.stop()
            self._thread.submit(self._file.close)
            self._thread.shutdown(wait=False)

    async def _chunks(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while chunk := await loop.run_in_executor(self._thread, self._file.chunk):
            yield chunk
