"""What cannot be read: kept beside a view, so that one bad value never hides the others.

A view makes one `BadValues`, hands it to whatever reads for it, and shows its rows. What is read
through it goes on: the value that cannot be read counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from streamqd.admin.pages import key_of
from streamqd.errors import BadValue, RedisRefused, RefusalKind
from streamqd.model import Unit
from streamqd.store import leases, untrusted
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.leases import LeaseView
from streamqd.store.scripts import Call, Reply

BATCH = 256  # commands of one exchange
_OURS = "what streamqd writes there"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value in Redis that is not what its key and field hold; `field` is '' for the whole key.

    `found` shows it as one can print it, or what the server says of it; `wanted` says what belongs
    there.
    """

    key: str
    field: str
    found: str
    wanted: str

    def __str__(self) -> str:
        where = f"{self.field} of {self.key}" if self.field else self.key
        return f"{where} cannot be read: it is {self.found} and not {self.wanted}"


class BadValues:
    """The bad values that one look has found, each named once."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Unreadable] = {}

    @property
    def rows(self) -> list[Unreadable]:
        """What was found, by key and field."""
        return [self._rows[each] for each in sorted(self._rows)]

    def add(self, error: BadValue | None) -> None:
        """Keep a bad value; None is none."""
        if error is not None:
            row = Unreadable(error.key, error.field, error.found, error.wanted)
            self._rows.setdefault((row.key, row.field), row)

    def keep(self, row: Unreadable) -> None:
        """Keep what another look has found."""
        self._rows.setdefault((row.key, row.field), row)

    def refused(self, key: str, error: RedisRefused) -> None:
        """Keep what the server says of a key. Raises it when it is not about this key alone."""
        if error.kind is not RefusalKind.OF_A_KEY:
            raise error
        self.add(BadValue(key, "", str(error)[:120], _OURS))

    def read(self, parse: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """What `parse` returns; None, and the value is kept, when that cannot be read."""
        try:
            return parse(*args, **named)
        except BadValue as error:
            self.add(error)
            return None

    def text(self, raw: bytes, key: str, field: str) -> str | None:
        """Text of somebody else, such as the name of a group; None when it is not UTF-8."""
        return self.read(untrusted.text, raw, key, field)


def ask_each(link: Connection, commands: Sequence[Sequence[Any]], bad: BadValues) -> list[Any]:
    """Run reading commands in bounded exchanges; None for a missing key and for a bad one."""
    replies: list[Any] = []
    for start in range(0, len(commands), BATCH):
        some = commands[start : start + BATCH]
        for command, reply in zip(some, link.pipeline(some), strict=True):
            if not isinstance(reply, RedisRefused):
                replies.append(reply)
                continue
            if "no such key" not in str(reply) and reply.kind is not RefusalKind.NO_GROUP:
                bad.refused(key_of(command), reply)
            replies.append(None)
    return replies


def measure_each(link: Connection, calls: Sequence[Call], bad: BadValues) -> list[Reply | None]:
    """Run reading scripts in bounded exchanges; None for one whose keys cannot be read."""
    replies: list[Reply | None] = []
    for start in range(0, len(calls), BATCH):
        some = calls[start : start + BATCH]
        for call, reply in zip(some, link.run_many(some), strict=True):
            if isinstance(reply, RedisRefused):
                bad.refused(call.key, reply)
            replies.append(None if isinstance(reply, RedisRefused) else reply)
    return replies


def lease_views(
    link: Connection, keys: Keys, units: Sequence[Unit], bad: BadValues
) -> list[LeaseView]:
    """Fence and lease of each unit. A number that cannot be read is 0."""
    commands = [command for unit in units for command in leases.view(keys, unit)]
    replies = ask_each(link, commands, bad)
    return [
        lease_view(replies[2 * at], replies[2 * at + 1], keys.fence(*unit), bad)
        for at, unit in enumerate(units)
    ]


def lease_view(
    fence: Sequence[bytes | None] | None, ttl_ms: int | None, key: str, bad: BadValues
) -> LeaseView:
    """Read the replies to the commands of `leases.view`; None stands for one that was refused."""
    token, epoch, owner, since, solo = fence or (None,) * 5
    ttl = -2 if ttl_ms is None else ttl_ms
    numbers = {"epoch": epoch, "since": since}
    while True:
        told = (token, numbers["epoch"], owner, numbers["since"], solo)
        try:
            return LeaseView.parse(told, ttl, key)
        except BadValue as error:
            bad.add(error)
            numbers[error.field] = None


def group_names(reply: Sequence[Any] | None, stream: str, bad: BadValues) -> list[dict[str, Any]]:
    """The groups of a stream by XINFO GROUPS, with `name` as text; others are kept as bad."""
    found = []
    for flat in reply or ():
        info = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        info["name"] = bad.text(info["name"], stream, "group")
        if info["name"] is not None:
            found.append(info)
    return found
