"""Load the scripts of producers into the server, for producers that may not do so themselves.

A producer whose Redis user may run EVALSHA but not EVAL can send only if the server has the
scripts. A restart of the server or SCRIPT FLUSH removes them, so this is checked periodically.
"""

from __future__ import annotations

from streamqd.errors import RedisResponseError, RedisUnavailableError
from streamqd.store import scripts
from streamqd.store.client import Connection

PRODUCER_SCRIPTS = ("message_append", "message_publish", "message_schedule")


class ScriptLoader:
    """Checks whether the server has the producers' scripts, and loads the missing ones."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._scripts = [scripts.get(name) for name in PRODUCER_SCRIPTS]

    def run(self) -> None:
        """Load the missing scripts on every node that answers.

        Nodes that do not answer or have a transient error are skipped. If this applies to all
        nodes, raises the first error. Raises RedisResponseError if a node refuses for another
        reason.
        """
        nodes = self._link.masters()
        silent: list[RedisResponseError | RedisUnavailableError] = []
        for node in nodes:
            try:
                self._load(node)
            except (RedisResponseError, RedisUnavailableError) as error:
                if isinstance(error, RedisResponseError) and not error.transient:
                    raise
                silent.append(error)
        if silent and len(silent) == len(nodes):
            raise silent[0]

    def _load(self, node: Connection) -> None:
        known = node.execute("SCRIPT", "EXISTS", *(each.sha for each in self._scripts))
        for script, loaded in zip(self._scripts, known, strict=True):
            if not loaded:
                node.execute("SCRIPT", "LOAD", script.source)
