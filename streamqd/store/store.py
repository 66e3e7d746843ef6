"""A connection, and the key names of one installation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamqd.errors import RedisResponseError
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Answer, Call, Reply


@dataclass(frozen=True, slots=True)
class Store:
    """The installation's data in Redis.

    Its methods are those of `Connection`, with their errors.
    """

    connection: Connection
    keys: Keys

    def run(self, call: Call) -> Reply:
        """Run a script."""
        return self.connection.run(call)

    def run_many(self, calls: Sequence[Call]) -> list[Reply | RedisResponseError]:
        """Run scripts in one write."""
        return self.connection.run_many(calls)

    def run_each(self, calls: Sequence[Call]) -> list[Answer]:
        """Run scripts in one write.

        For a silent node or an invalid reply, the element is an error.
        """
        return self.connection.run_each(calls)

    def execute(self, *args: Any) -> Any:
        """Run one command."""
        return self.connection.execute(*args)

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one write. Error replies are elements of the result."""
        return self.connection.pipeline(commands)
