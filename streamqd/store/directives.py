"""Read and write the directives of operators, which every instance reads with its heartbeat.

Directives are stored in a HASH. The name of each field is the name of a directive, and its value is
a JSON object with `version`, `at_unix_ms` (server clock), `by`, `why` and, for a move, `to`.

    pause:TOPIC/PARTITION/GROUP    fetch no messages for these assignments; any part may be `*`
    stop:TOPIC/*/GROUP             no instance may own a partition of the group
    move:TOPIC/PARTITION/GROUP     the assignment must move to the instance `to`
    drain:INSTANCE                 the instance must not own any assignment
    reload:INSTANCE, reload:*      read configuration and code again, once per directive
    rebalance                      rebalance the fleet now, once per directive
    stack:TOPIC/PARTITION/GROUP    the owner publishes the stack of its worker, once per directive
    last                           the latest time of all directives; not a directive itself

An invalid field is ignored but not removed, because a later version may have written it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from streamqd.errors import ContractError
from streamqd.model import Assignment
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

VERSION = 1
# Maximum number of directives, because every instance reads all of them with each heartbeat.
DIRECTIVES_MAX = 256
WHY_MAX = 200  # maximum number of characters in a reason
TIME_END = 1 << 52  # times from here on (unix ms) are invalid, and `control_change` ignores them
ALL_INSTANCES = "*"
REBALANCE = "rebalance"
LAST = "last"


class Scope(NamedTuple):
    """The assignments to which a pause applies. A part that is None matches any value."""

    topic: str | None = None
    partition: int | None = None
    group: str | None = None

    def covers(self, assignment: Assignment | Scope) -> bool:
        """Return True if this scope includes the assignment, or all assignments of a scope."""
        return all(mine in (None, its) for mine, its in zip(self, assignment, strict=True))

    def __str__(self) -> str:
        return "/".join("*" if part is None else str(part) for part in self)


class Directive(NamedTuple):
    """The time and author of a directive, and the reason for it.

    `to` is the instance to which a move directive moves its assignment. For any other directive, it
    is ''.
    """

    at_unix_ms: int
    by: str
    why: str
    to: str = ""


@dataclass(frozen=True)
class Directives:
    """All directives of a fleet.

    `unreadable` maps the name of each invalid field to the reason why it cannot be read.
    """

    pauses: dict[Scope, Directive] = field(default_factory=dict)
    stops: dict[Scope, Directive] = field(default_factory=dict)
    moves: dict[Assignment, Directive] = field(default_factory=dict)
    drains: dict[str, Directive] = field(default_factory=dict)
    reloads: dict[str, Directive] = field(default_factory=dict)
    stacks: dict[Assignment, Directive] = field(default_factory=dict)
    rebalance: Directive | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def find_pause(self, assignment: Assignment | Scope) -> tuple[Scope, Directive] | None:
        """Return the pause that covers an assignment or a scope, or None if it is not paused.

        If several pauses cover it, the one with the widest scope is returned.
        """
        found = [each for each in self.pauses if each.covers(assignment)]
        scope = min(found, key=lambda each: sum(part is not None for part in each), default=None)
        return None if scope is None else (scope, self.pauses[scope])

    def find_stop(self, assignment: Assignment) -> Directive | None:
        """Return the directive that stopped the group of an assignment, or None."""
        return self.stops.get(stop_scope(assignment.topic, assignment.group))

    def find_reload(self, instance: str) -> Directive | None:
        """Return the latest reload of this instance or of all instances, or None."""
        orders = (self.reloads.get(instance), self.reloads.get(ALL_INSTANCES))
        some = [order for order in orders if order is not None]
        return max(some, key=lambda order: order.at_unix_ms, default=None)

    def find_reload_unix_ms(self, instance: str) -> int:
        """Return the time of the directive from `find_reload` (unix ms), or 0 if there is none."""
        found = self.find_reload(instance)
        return found.at_unix_ms if found else 0


def read(flat: Sequence[bytes]) -> Directives:
    """Parse all directives of a fleet from a list of alternating field names and values.

    Fields that cannot be parsed are collected in `unreadable`.
    """
    found = Directives()
    rebalance: Directive | None = None
    for raw_name, raw in zip(flat[::2], flat[1::2], strict=True):
        name = raw_name.decode("utf-8", "replace")
        if name == LAST:
            continue
        try:
            directive = _directive(raw)
            kind, _, rest = name.partition(":")
            if kind == "pause":
                found.pauses[parse_scope(rest)] = directive
            elif kind == "stop":
                found.stops[_group(parse_scope(rest))] = directive
            elif kind == "move" and directive.to:
                found.moves[_assignment(parse_scope(rest))] = directive
            elif kind == "drain" and rest:
                found.drains[rest] = directive
            elif kind == "reload" and rest:
                found.reloads[rest] = directive
            elif kind == "stack":
                found.stacks[_assignment(parse_scope(rest))] = directive
            elif name == REBALANCE:
                rebalance = directive
            else:
                raise ValueError("not a directive that this version supports")
        except (ValueError, TypeError, RecursionError) as error:
            found.unreadable[name] = str(error)
    return replace(found, rebalance=rebalance)


def _directive(raw: bytes) -> Directive:
    found: Any = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    if found.get("version") != VERSION:
        raise ValueError(
            f"of version {found.get('version')!r}, but this release supports {VERSION}"
        )
    at = found.get("at_unix_ms")
    if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < TIME_END:
        raise ValueError("without a time")
    return Directive(at, *(str(found.get(name, "")) for name in ("by", "why", "to")))


def parse_scope(text: str) -> Scope:
    """Parse a scope written as `TOPIC/PARTITION/GROUP`. Any part may be `*`. Raises ValueError."""
    parts = text.split("/")
    if len(parts) != 3 or not all(parts):
        raise ValueError("not of the form TOPIC/PARTITION/GROUP")
    topic, number, group = parts
    if number != "*" and not (number.isascii() and number.isdigit() and len(number) < 10):
        raise ValueError(f"{number!r} is not the number of a partition")
    return Scope(
        None if topic == "*" else topic,
        None if number == "*" else int(number),
        None if group == "*" else group,
    )


def stop_scope(topic: str, group: str) -> Scope:
    """Return the scope of the directive that stops a group."""
    return Scope(topic, None, group)


def _group(scope: Scope) -> Scope:
    if scope.topic is None or scope.partition is not None or scope.group is None:
        raise ValueError("it does not name all partitions of one group")
    return scope


def _assignment(scope: Scope) -> Assignment:
    if scope.topic is None or scope.partition is None or scope.group is None:
        raise ValueError("it does not name one partition of one group")
    return Assignment(scope.topic, scope.partition, scope.group)


# --- writing --------------------------------------------------------------------------------------


def change(
    keys: Keys,
    fleet: str,
    name: str = "",
    *,
    by: str = "",
    why: str = "",
    to: str = "",
    remove: Sequence[str] = (),
) -> Call:
    """Write the directive `name`, and remove the directives in `remove`, in one step.

    If `name` is '', the call only removes directives. The reason `why` is cut off after WHY_MAX
    characters.
    """
    if len(remove) > 2 * DIRECTIVES_MAX:
        raise ContractError(f"control_change: {len(remove)} directives in one call")
    body = {"version": VERSION, "by": by, "why": why[:WHY_MAX], **({"to": to} if to else {})}
    return scripts.get("control_change").call(
        {"control": keys.directives(fleet)},
        directives_max=DIRECTIVES_MAX,
        field=name,
        body=json.dumps(body, separators=(",", ":")),
        removed=list(remove),
    )


class DirectiveChange(NamedTuple):
    """The time of the change (unix ms, server clock), and the number of directives removed."""

    at_unix_ms: int
    removed: int

    @classmethod
    def parse(cls, reply: Reply) -> DirectiveChange:
        """Parse an OK reply."""
        return cls(int(reply.values[0]), int(reply.values[1]))
