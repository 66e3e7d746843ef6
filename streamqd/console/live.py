"""Live pages: one shared poller, and one stream of server-sent events for each open page.

After each snapshot, the live part of each open page is rendered. Pages with the same URL, role and
`bodies` share the result. If a live part has not changed, its pages get an event without data.
Browsers close the stream while a page is hidden or paused. If no page is listening, nothing is read
from Redis.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from streamqd import logs
from streamqd.console.access import Person
from streamqd.console.backend import SNAPSHOT_SECONDS
from streamqd.errors import StreamqdError

STREAMS_MAX = 500
FAILED = "Live updates stopped after an internal error. The traceback is in the console's log."
SILENCE_SECONDS = 10.0  # seconds without an event after which a comment keeps the stream alive


@dataclass(frozen=True, slots=True)
class PageKey:
    """The values on which the live part of a page depends. `url` is its path with the query."""

    url: str
    person: Person  # without the name, so that all persons with a role share the key


@dataclass(slots=True, eq=False)
class LiveStream:
    """One open page. `pending` is the latest event that was not sent to it yet."""

    key: PageKey
    pending: str = ""
    sent: str = ""  # the live part that the page is showing
    ready: asyncio.Event = field(default_factory=asyncio.Event)


def sse(event: str, data: str) -> str:
    """Return a server-sent event."""
    lines = "".join(f"data: {line}\n" for line in data.split("\n"))
    return f"event: {event}\n{lines}\n"


class Hub:
    """The open pages. Use it only in the event loop.

    `render` returns the live part of a page, and raises StreamqdError if Redis does not answer.
    """

    def __init__(
        self,
        render: Callable[[PageKey], Awaitable[str]],
        explain: Callable[[StreamqdError], str],
    ) -> None:
        self._render = render
        self._explain = explain
        self._streams: set[LiveStream] = set()
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pages(self) -> int:
        """The number of open pages that are listening."""
        return len(self._streams)

    def close(self) -> None:
        """Close the streams of all open pages."""
        self._closed = True
        for each in self._streams:
            each.ready.set()
        if self._poller is not None:
            self._poller.cancel()

    async def listen(self, key: PageKey) -> AsyncIterator[str]:
        """Yield events for a page until the page is closed or the console stops."""
        stream = LiveStream(key)
        self._streams.add(stream)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        try:
            yield "retry: 2000\n\n"
            while not self._closed:
                try:
                    await asyncio.wait_for(stream.ready.wait(), SILENCE_SECONDS)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                stream.ready.clear()
                event, stream.pending = stream.pending, ""
                if event:
                    yield event
        finally:
            self._streams.discard(stream)
            if not self._streams and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def _poll(self) -> None:
        while True:
            for key in {each.key for each in self._streams}:
                await self._update(key)
            await asyncio.sleep(SNAPSHOT_SECONDS)

    async def _update(self, key: PageKey) -> None:
        try:
            html = await self._render(key)
            event = sse("part", html)
        except StreamqdError as error:
            html, event = "", sse("away", json.dumps(self._explain(error)))
        except Exception as error:  # noqa: BLE001 - the other pages stay live
            logs.event("console.failed", logging.ERROR, path=key.url, exc=error)
            html, event = "", sse("away", json.dumps(FAILED))
        for each in self._streams:
            if each.key != key:
                continue
            same = bool(html) and each.sent == html
            each.pending, each.sent = (sse("same", "") if same else event), html
            each.ready.set()
