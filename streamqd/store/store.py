"""A connection together with the key names of one installation."""

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
    """The data of an installation in Redis.

    The methods do the same as those of `Connection`, and raise the same errors.
    """

    connection: Connection
    keys: Keys

    def run(self, call: Call) -> Reply:
        """Run a script."""
        return self.connection.run(call)

    def run_many(self, calls: Sequence[Call]) -> list[Reply | RedisResponseError]:
        """Send all script calls in one write, and return their replies in the same order."""
        return self.connection.run_many(calls)

    def run_each(self, calls: Sequence[Call]) -> list[Answer]:
        """Run scripts as `run_many` does, but keep the other replies if a call fails.

        The result of a call is an error if its node did not answer or its reply is invalid.
        """
        return self.connection.run_each(calls)

    def execute(self, *args: Any) -> Any:
        """Run one command."""
        return self.connection.execute(*args)

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands in one write. The result of a command may be an error."""
        return self.connection.pipeline(commands)
