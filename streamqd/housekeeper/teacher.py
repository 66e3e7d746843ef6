"""Teaching the server the scripts of producers, who may be forbidden to bring their own.

A producer whose user has EVALSHA and not EVAL can deduplicate and schedule once the server knows
the two scripts. A restart of the server, and SCRIPT FLUSH, forget them.
"""

from __future__ import annotations

from streamqd.store import scripts
from streamqd.store.client import Link

TAUGHT = ("message_publish", "message_schedule")


class Teacher:
    """Looks whether the server knows the scripts, and teaches it those that it does not."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._scripts = [scripts.get(name) for name in TAUGHT]

    def run(self) -> None:
        """Teach what is missing."""
        for node in self._link.masters():
            known = node.execute("SCRIPT", "EXISTS", *(each.sha for each in self._scripts))
            for script, there in zip(self._scripts, known, strict=True):
                if not there:
                    node.execute("SCRIPT", "LOAD", script.source)
