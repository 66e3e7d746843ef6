"""Hold a lease on the work of a pipeline, so that two runs do not do the same work.

The lease is stored in Redis, and a thread with its own connection renews it. Correctness does not
depend on it: even without the lease, the archive would contain no entry twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Self

from streamqd.errors import RedisResponseError, RedisUnavailableError, RequestRefusedError
from streamqd.process_token import describe_holder, is_gone, new_token
from streamqd.store import archives
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call

TTL = 30.0  # seconds without a renewal after which another run may start
_RENEWALS = 5  # renewals per TTL


class PipelineLease:
    """The lease of one pipeline on one topic, which is held for the duration of a `with` block.

    1. When the block is entered, the lease is acquired. If another run holds it, this raises
       RequestRefusedError, whose message names the holder.
    2. Inside the block, a thread renews the lease. If the lease is lost, `check` raises
       RedisUnavailableError.
    3. When the block exits, the lease is released. If the process is killed, the lease expires. The
       next run on the same host does not wait for that, because it detects that the process has
       exited.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        keys: Keys,
        topic: str,
        name: str,
        *,
        ttl: float = TTL,
        what: str = "",
    ) -> None:
        """Prepare the lease without acquiring it.

        `what` describes the work in error messages, such as "table x is being written". The message
        continues with "by" and the holder.
        """
        self._what = what or f"the pipeline {name.partition(':')[0]} of {topic} is being run"
        self._connect = connect
        self._keys = keys
        self._topic = topic
        self._name = name
        self._ttl = ttl
        self.token = new_token()
        self._until = 0.0
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="pipeline-lease", daemon=True)

    def __enter__(self) -> Self:
        began = time.monotonic()
        with closing(self._connect()) as link:
            reply = link.run(self._acquire_call(""))
            if reply.word == "HELD" and is_gone(holder := _text(reply.values[0])):
                reply = link.run(self._acquire_call(holder))
        if reply.word == "HELD":
            raise RequestRefusedError(
                f"{self._what} by {describe_holder(_text(reply.values[0]))}, whose lease expires"
                f" {max(0, reply.values[1]) / 1000:.0f} s after it exits"
            )
        self._until = began + self._ttl
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise RedisUnavailableError if the lease was lost, so that another run may have started.

        This happens only if Redis does not answer for the TTL of the lease, so the error reports
        that. Checking takes no round trip.
        """
        if self._lost or time.monotonic() > self._until:
            raise RedisUnavailableError(
                f"Redis did not answer for {self._ttl:.0f} s, so this run lost its lease on"
                f" {self._topic} and another run may have started; run the command again",
                sent=False,
            )

    def _acquire_call(self, dead_token: str) -> Call:
        return archives.acquire_lease(
            self._keys, self._topic, self._name, self.token, self._ttl, dead_token
        )

    def _renew(self) -> None:
        arguments = (self._keys, self._topic, self._name, self.token)
        with closing(self._connect()) as link:
            while not self._stop.wait(self._ttl / _RENEWALS):
                began = time.monotonic()
                try:
                    reply = link.run(archives.renew_lease(*arguments, self._ttl))
                except (RedisUnavailableError, RedisResponseError):
                    continue  # if this lasts too long, `check` raises an error
                if reply.word != "OK":
                    self._lost = True
                    return
                self._until = began + self._ttl
            with suppress(RedisUnavailableError, RedisResponseError):  # else the lease expires
                link.run(archives.release_lease(*arguments))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
