"""Reading that goes on where something is refused, and remembers what that was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamqd.admin.pages import BATCH
from streamqd.errors import RedisRefused, RefusalKind
from streamqd.store.client import Connection
from streamqd.store.scripts import Call, Reply

# The server as a whole does not serve: there is nothing to go on with.
_HOPELESS = (RefusalKind.AWAY, RefusalKind.BUSY, RefusalKind.FULL, RefusalKind.LOGIN)


class TolerantReader:
    """Runs reading commands and scripts in bounded exchanges.

    A refused one answers None. What the Redis user may not do is kept in `forbidden`, by the words
    of the command.
    """

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.forbidden: set[str] = set()

    def ask(self, commands: Sequence[Sequence[Any]], batch: int = BATCH) -> list[Any]:
        """Run commands, `batch` of them in one exchange."""
        replies: list[Any] = []
        for start in range(0, len(commands), batch):
            some = commands[start : start + batch]
            for command, reply in zip(some, self.link.pipeline(some), strict=True):
                replies.append(self._tolerated(_words(command), reply))
        return replies

    def measure(self, calls: Sequence[Call]) -> list[Reply | None]:
        """Run reading scripts."""
        replies: list[Reply | None] = []
        for start in range(0, len(calls), BATCH):
            some = calls[start : start + BATCH]
            replies += [self._tolerated("EVALSHA", reply) for reply in self.link.run_many(some)]
        return replies

    def _tolerated(self, words: str, reply: Any) -> Any:
        if not isinstance(reply, RedisRefused):
            return reply
        if reply.kind in _HOPELESS:
            raise reply
        if reply.kind is RefusalKind.FORBIDDEN:
            self.forbidden.add(words)
        return None


def _words(command: Sequence[Any]) -> str:
    """The name of a command, with its second word where that belongs to it."""
    name = str(command[0])
    return f"{name} {command[1]}" if name in ("CONFIG", "SLOWLOG", "XINFO") else name


def named(flat: Sequence[Any]) -> Mapping[str, Any]:
    """Names and values by turns, as a dict."""
    return {
        name.decode("utf-8", "replace"): value
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
