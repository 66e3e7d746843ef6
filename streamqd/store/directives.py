"""Parse the directives of operators, a HASH that every instance reads with its heartbeat.

A field names a directive. Its value is a JSON object: `version`, `at_unix_ms` (server clock), `by`,
`why`, and `to` for a move.

    pause:TOPIC/PARTITION/GROUP    fetch nothing there; any part may be `*`
    stop:TOPIC/*/GROUP             no instance owns a partition of the group
    move:TOPIC/PARTITION/GROUP     the assignment belongs on the instance `to`
    drain:INSTANCE                 the instance owns nothing
    reload:INSTANCE, reload:*      read configuration and code again, once per directive
    rebalance                      level the fleet now, once per directive
    stack:TOPIC/PARTITION/GROUP    the owner publishes the stack of its worker, once per directive
    last                           the latest time of all directives; not a directive itself

An invalid field is ignored and stays, because a later version may have written it.
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
# Maximum number of directives, because every instance reads all with each heartbeat.
DIRECTIVES_MAX = 256
WHY_MAX = 200  # characters of a reason
TIME_END = 1 << 52  # unix ms. `control_change` resets later times.
ALL_INSTANCES = "*"
REBALANCE = "rebalance"
LAST = "last"


class Scope(NamedTuple):
    """The assignments that a pause covers. None stands for all."""

    topic: str | None = None
    partition: int | None = None
    group: str | None = None

    def covers(self, assignment: Assignment | Scope) -> bool:
        """Return True if an assignment, or every assignment of another scope, is in this scope."""
        return all(mine in (None, its) for mine, its in zip(self, assignment, strict=True))

    def __str__(self) -> str:
        return "/".join("*" if part is None else str(part) for part in self)


class Directive(NamedTuple):
    """When, by whom and why a directive was given. `to`: the target instance of a move, or ''."""

    at_unix_ms: int
    by: str
    why: str
    to: str = ""


@dataclass(frozen=True)
class Directives:
    """All directives. `unreadable` maps other fields to the reason why they cannot be read."""

    pauses: dict[Scope, Directive] = field(default_factory=dict)
    stops: dict[Scope, Directive] = field(default_factory=dict)
    moves: dict[Assignment, Directive] = field(default_factory=dict)
    drains: dict[str, Directive] = field(default_factory=dict)
    reloads: dict[str, Directive] = field(default_factory=dict)
    stacks: dict[Assignment, Directive] = field(default_factory=dict)
    rebalance: Directive | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def pause_of(self, assignment: Assignment | Scope) -> tuple[Scope, Directive] | None:
        """Return the widest pause that covers an assignment or a scope, or None."""
        found = [each for each in self.pauses if each.covers(assignment)]
        scope = min(found, key=lambda each: sum(part is not None for part in each), default=None)
        return None if scope is None else (scope, self.pauses[scope])

    def stop_of(self, assignment: Assignment) -> Directive | None:
        """Return the directive that stopped the group of an assignment, or None."""
        return self.stops.get(stop_scope(assignment.topic, assignment.group))

    def reload_for(self, instance: str) -> Directive | None:
        """Return the latest reload of the instance or of all, None without one."""
        orders = (self.reloads.get(instance), self.reloads.get(ALL_INSTANCES))
        some = [order for order in orders if order is not None]
        return max(some, key=lambda order: order.at_unix_ms, default=None)

    def reload_of(self, instance: str) -> int:
        """Return the time of the reload that `reload_for` returns (unix ms), or 0 for none."""
        found = self.reload_for(instance)
        return found.at_unix_ms if found else 0


def read(flat: Sequence[bytes]) -> Directives:
    """Parse the hash, given as alternating names and values. Invalid fields are in `unreadable`."""
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
                found.pauses[scope_of(rest)] = directive
            elif kind == "stop":
                found.stops[_group(scope_of(rest))] = directive
            elif kind == "move" and directive.to:
                found.moves[_assignment(scope_of(rest))] = directive
            elif kind == "drain" and rest:
                found.drains[rest] = directive
            elif kind == "reload" and rest:
                found.reloads[rest] = directive
            elif kind == "stack":
                found.stacks[_assignment(scope_of(rest))] = directive
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


def scope_of(text: str) -> Scope:
    """Parse `TOPIC/PARTITION/GROUP`, where any part may be `*`. Raises ValueError."""
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
    """Return the scope of a directive that stops a group."""
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
    """Write the directive `name` ('' for none), and remove the directives in `remove`."""
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
        """Parse the reply OK."""
        return cls(int(reply.values[0]), int(reply.values[1]))
