"""Shell completion of names that are read from Redis, such as topics and groups.

The metavar of a parameter, or its name if it has no metavar, selects the names to complete. For
example, TOPIC stands for topics, and TOPIC/GROUP for topics and their groups. If an error occurs,
or if the names are not found within a second, the shell gets no completions and no message.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from streamqd import config
from streamqd.cli.session import Session
from streamqd.config.setting import NAME
from streamqd.model import DLQ_SUFFIX
from streamqd.store import topics
from streamqd.store.client import Connection

SECONDS = 1.0  # time limit of a completion in seconds, including the time to connect
OFFERED_MAX = 1000  # maximum number of names that are offered


class CompletionRequest(NamedTuple):
    """A request for the completions of a parameter.

    `params` contains the parameters that were typed before it, and `incomplete` the text that was
    typed for this parameter.
    """

    session: Session
    link: Connection
    params: Mapping[str, Any]
    incomplete: str


Lookup = Callable[[CompletionRequest], Iterable[str]]


class CompletedName(click.types.StringParamType):
    """A parameter type for names in Redis. `lookup` reads the names for completion."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def shell_complete(
        self, ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return up to OFFERED_MAX names that start with the typed text.

        Return no names if Redis does not reply within SECONDS.
        """
        found: list[str] = []

        def ask() -> None:
            # An error message would garble the command line that the user is typing.
            with contextlib.suppress(Exception):
                session = _session(ctx)
                with session.using_redis():
                    names = self._lookup(
                        CompletionRequest(session, session.link, ctx.params, incomplete)
                    )
                    found.extend(sorted(each for each in set(names) if _is_complete(each)))

        # This is a daemon thread, because a DNS or Redis server that does not reply must not block
        # the shell.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(SECONDS)
        fitting = [each for each in [*found] if each.startswith(incomplete)]
        return [CompletionItem(each) for each in fitting[:OFFERED_MAX]]


def add_completion(command: click.Command) -> click.Command:
    """Add completion to the parameters of a command and its subcommands."""
    for param in command.params:
        lookup = LOOKUPS.get(param.metavar or param.name or "")
        if lookup is not None and param.type is click.STRING:
            param.type = CompletedName(lookup)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_completion(each)
    return command


def _topics(asked: CompletionRequest) -> list[str]:
    found = asked.link.execute("SMEMBERS", asked.session.keys.registry())
    return [each.decode("utf-8", "replace") for each in found]


def _groups(asked: CompletionRequest) -> list[str]:
    named = asked.params.get("topic")
    chosen = [str(named).partition("/")[0]] if named else _topics(asked)
    return [name for topic in chosen for name in topics.known_groups(asked.session.store, topic)]


def _instances(asked: CompletionRequest) -> list[str]:
    members = asked.session.keys.members(asked.session.settings.daemon.fleet)
    return [
        each.decode("utf-8", "replace") for each in asked.link.execute("ZRANGE", members, 0, -1)
    ]


def _schedules(asked: CompletionRequest) -> list[str]:
    found = asked.link.execute("HKEYS", asked.session.keys.schedule_index())
    return [each.decode("utf-8", "replace") for each in found]


def _places(asked: CompletionRequest) -> list[str]:
    """Return topics or, after `TOPIC/`, the topic's groups and its partitions with each group."""
    topic, slash, _ = asked.incomplete.partition("/")
    if not slash:
        return _topics(asked)
    count = topics.partition_count(asked.session.store, topic) or 0
    groups = topics.known_groups(asked.session.store, topic)
    places = [f"{topic}/{number}" for number in range(count)]
    return [
        *(f"{topic}/{group}" for group in groups),
        *(f"{place}/{group}" for place in places for group in groups),
    ]


def _named_groups(asked: CompletionRequest) -> list[str]:
    """Return topics or, after `TOPIC/`, the topic's groups."""
    return [each for each in _places(asked) if each.count("/") < 2]


def _assignments(asked: CompletionRequest) -> list[str]:
    """Return topics or, after `TOPIC/`, the topic's partitions, both alone and with each group."""
    topic, slash, _ = asked.incomplete.partition("/")
    if not slash:
        return _topics(asked)
    count = topics.partition_count(asked.session.store, topic) or 0
    partitions = [f"{topic}/{number}" for number in range(count)]
    return [*partitions, *(each for each in _places(asked) if each.count("/") == 2)]


# The keys are metavars of parameters, or names of parameters that have no metavar.
LOOKUPS: dict[str, Lookup] = {
    "topic": _topics,
    "TOPIC": _topics,
    "TOPIC/GROUP": _named_groups,
    "[TOPIC[/GROUP]]...": _named_groups,
    "TOPIC/PARTITION/GROUP": _places,
    "TOPIC/PARTITION[/GROUP]": _places,
    "[TOPIC[/GROUP] | TOPIC/PARTITION/GROUP]": _places,
    "TOPIC[/PARTITION[/GROUP]]": _assignments,
    "group": _groups,
    "GROUP": _groups,
    "SCHEDULE": _schedules,
    "SCHEDULE...": _schedules,
    "instance": _instances,
    "INSTANCE": _instances,
}


def _session(ctx: click.Context) -> Session:
    """Return a session with the `--config` option that was typed before or after the command."""
    typed = ctx.find_object(Session)
    named = typed.config_path if typed else None
    named = named or ctx.find_root().params.get("config_path")
    return Session(config_path=Path(named) if named else config.find(), timeout=SECONDS)


def _is_complete(name: str) -> bool:
    """Return True if the text consists of valid names. Any other text could harm the shell."""
    return all(NAME.fullmatch(part.removesuffix(DLQ_SUFFIX)) for part in name.split("/"))
