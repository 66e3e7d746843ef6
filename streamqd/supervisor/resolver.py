"""Resolve host names in a child process, because a lookup has no time limit of its own.

If the name server does not answer, a lookup takes 5 seconds, which would delay the renewal of
leases. So the supervisor waits only for a limited time. If the child is slower, it keeps running,
and the next lookup of the same name uses its answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamqd.store.transport import resolve
from streamqd.subprocess_task import SubprocessTask

GIVE_UP_SECONDS = 60.0  # time limit for a resolution, after which it is started again
KEPT_SECONDS = 60.0  # an answer can be used for this long after its resolution started


@dataclass
class Resolver:
    """Resolves names for the supervisor's connections.

    No more than one child runs for each name. Numeric addresses are returned without a child.
    """

    forget: Sequence[Callable[[], None]] = ()  # passed to `process.spawn`
    _asked: dict[tuple[str, int], SubprocessTask] = field(default_factory=dict)

    @property
    def pids(self) -> set[int]:
        """The process IDs of the running children."""
        return {task.pid for task in self._asked.values()}

    def lookup(self, host: str, port: int, seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
        """Return the addresses of a name. This is the supervisor's `transport.Lookup`.

        Raises socket.gaierror if the name does not exist or is not resolved within `seconds`.
        """
        self._forget_old()
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except OSError:
            return self._lookup(host, port, seconds)
        return [(family, address) for family, _, _, _, address in found]

    def _lookup(self, host: str, port: int, seconds: float) -> list[tuple[int, tuple[Any, ...]]]:
        end = time.monotonic() + seconds
        asked = host, port
        if asked not in self._asked:
            self._asked[asked] = SubprocessTask(
                partial(_resolve, host, port),
                title="streamqd: resolve",
                timeout=GIVE_UP_SECONDS,
                forget=self.forget,
            )
        while (outcome := self._asked[asked].poll(max(0.0, end - time.monotonic()))) is None:
            if time.monotonic() >= end:
                raise socket.gaierror(socket.EAI_AGAIN, "its name is not resolved yet")
        del self._asked[asked]
        if outcome.error:
            raise socket.gaierror(socket.EAI_FAIL, f"its name was not resolved: {outcome.error}")
        if isinstance(outcome.result, str):
            raise socket.gaierror(socket.EAI_NONAME, outcome.result)
        return [(family, tuple(address)) for family, address in outcome.result]

    def _forget_old(self) -> None:
        """Drop answers that are too old to use, because the addresses may have changed."""
        old = time.monotonic() - KEPT_SECONDS
        for asked, task in list(self._asked.items()):
            if task.began <= old and task.poll() is not None:
                del self._asked[asked]


def _resolve(host: str, port: int) -> object:
    try:
        return resolve(host, port, GIVE_UP_SECONDS)
    except OSError as error:
        return str(error.strerror)
    except UnicodeError as error:
        return str(error)
