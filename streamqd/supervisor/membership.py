"""Build the heartbeat of this instance, and process the reply, which lists the fleet's members."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from random import random
from typing import Any

from streamqd import logs, startup
from streamqd.config.schema import Daemon
from streamqd.errors import ContractError, InvalidValueError, RedisResponseError
from streamqd.model import Assignment
from streamqd.policy import heartbeats
from streamqd.policy.rebalance import MemberView
from streamqd.policy.silence import SilenceDetector
from streamqd.store import directives, key_types, members
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.replies import check_valid
from streamqd.store.scripts import Call, Reply
from streamqd.supervisor.partition import AssignmentState, Phase
from streamqd.version import __version__


class Membership:
    """Builds and schedules this instance's heartbeats, and keeps the reply to the last one."""

    def __init__(self, daemon: Daemon, keys: Keys, lock_id: str) -> None:
        self.daemon = daemon  # settings, which a reload replaces
        self.announcement: Mapping[str, object] = {}  # additional fields of the heartbeat
        self.heartbeat_at = 0.0  # monotonic time at which the next heartbeat is due
        self.seen: list[MemberView] = []  # members in the last valid reply
        self.server_unix_ms = 0  # Redis time of that reply
        self.directives: directives.Directives | None = None  # None before the first reply
        self.interval = daemon.lease_ttl / 5
        self.silence = SilenceDetector(daemon.instance, daemon.lease_ttl, self.interval)
        self.predecessor_nonce = ""  # nonce of a dead predecessor that is still to be removed
        self.accepted = False  # True if Redis accepted the last heartbeat under this name
        # The error of a heartbeat that failed because a key has the wrong type. It becomes '' when
        # that key has been found and logged.
        self.mistyped = ""
        self.duplicate: dict[str, Any] = {}  # host and PID of another run with the same name
        self._keys = keys
        self._lock_id = lock_id
        self._nonce = secrets.token_hex(8)
        self._started = time.time()
        self._heartbeat_sent_at = 0.0
        self._leaving = False
        self._duplicate_nonce: object = None
        self._stored_directives: list[bytes] | None = None
        self._bad_members = logs.bad_values()
        self._mistyped = logs.Once("redis.bad_value", logging.ERROR)
        self._refusal = ""  # the last refusal of the heartbeat that was logged

    def heartbeat_soon(self) -> None:
        """Schedule a heartbeat soon, after which the supervisor reads the state of the fleet.

        It is sent at the next tick, or later if the fleet is large.
        """
        at = heartbeats.woken_heartbeat(
            self._heartbeat_sent_at, self.interval, len(self.seen), random()
        )
        self.schedule_heartbeat(at)

    def schedule_heartbeat(self, at: float) -> None:
        """Send the next heartbeat at this monotonic time, unless it is already due earlier."""
        self.heartbeat_at = min(self.heartbeat_at, at)

    def depart(self) -> None:
        """Schedule a heartbeat soon that reports this instance as leaving the fleet."""
        if not self._leaving:
            self._leaving = True
            self.heartbeat_soon()

    def now_unix_ms(self) -> int:
        """Return the current Redis time in unix ms, computed from the last reply."""
        return self.server_unix_ms + round((time.monotonic() - self._heartbeat_sent_at) * 1000)

    def wake_command(self) -> tuple[str, ...]:
        """Return the command that wakes the other instances in the fleet."""
        return "PUBLISH", self._keys.wake(self.daemon.fleet), self.daemon.instance

    def heartbeat(
        self,
        now: float,
        partitions: Mapping[Assignment, AssignmentState],
        offers: Sequence[Assignment],
    ) -> Call:
        """Return the call that reports this instance and its state to the fleet."""
        daemon = self.daemon
        info = {
            "boot": startup.boot_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lock": self._lock_id,
            "weight": daemon.weight,
            "cap": daemon.max_partitions,
            "offers": sorted({(assignment.topic, assignment.group) for assignment in offers}),
            "broken": sorted(
                assignment for assignment in offers if partitions[assignment].broken_until > now
            ),
            "owned": sum(each.phase is not Phase.FREE for each in partitions.values()),
            "leaving": self._leaving,
            "ttl": daemon.lease_ttl,
            "version": __version__,
            "started": round(self._started, 3),
            **self.announcement,
        }
        return members.heartbeat(
            self._keys,
            daemon.fleet,
            daemon.instance,
            self._nonce,
            info,
            daemon.lease_ttl,
            self.silence.forgettable,
        )

    def apply_reply(self, reply: Reply | RedisResponseError | ContractError, jitter: float) -> bool:
        """Process the reply to a heartbeat. Return True if it lists the fleet's members.

        An invalid reply or an error is logged, and the last list of members stays in use. `jitter`
        is a random number that varies the time of the next heartbeat.
        """
        now = self._heartbeat_sent_at = time.monotonic()
        self.heartbeat_at = heartbeats.next_heartbeat(now, self.interval, jitter)
        try:
            return self._accept_reply(check_valid(reply), now)
        except InvalidValueError as error:
            logs.bad_value(error)
        except Exception as error:  # noqa: BLE001 - the reply may have any shape
            self._log_refusal(f"{type(error).__name__}: {error}")
        return False

    def _accept_reply(self, reply: Reply | RedisResponseError, now: float) -> bool:
        if isinstance(reply, RedisResponseError):
            if key_types.is_of_type(reply):
                self.mistyped = str(reply)
            else:
                self._log_refusal(str(reply))
            return False
        if reply.word == "DUPLICATE":
            other = members.parse_duplicate(reply)
            self._reset_refusals()
            self._record_duplicate(other, now)
            return False
        present = members.HeartbeatReply.parse(reply)
        invalid: list[InvalidValueError] = []
        seen = [self._parse_member(member, invalid) for member in present.members]
        if present.directives != self._stored_directives:
            self.directives = directives.read(present.directives)
            self._stored_directives = present.directives
        self._reset_refusals()
        self.accepted, self.duplicate = True, {}
        self.silence.forget_duplicate()
        self.server_unix_ms, self.seen = present.now_unix_ms, seen
        self._bad_members.report_values(invalid)
        return True

    def _reset_refusals(self) -> None:
        """Forget earlier refusals, so that the next one is logged even if it is the same."""
        self._mistyped.report({})
        self._refusal = ""

    def _log_refusal(self, error: str) -> None:
        """Log a refusal of the heartbeat, unless it is the same as the last one."""
        if error != self._refusal:
            self._refusal = error
            logs.event("redis.refused", logging.ERROR, request="heartbeat", error=error)

    def log_mistyped_keys(self, link: Connection) -> None:
        """Find and log the keys that made a heartbeat fail because they have the wrong type.

        Each key is logged once, together with the remedy. This takes one round trip. Raises
        RedisUnavailableError if Redis does not answer.
        """
        found = key_types.find_mistyped(link, members.expected_types(self._keys, self.daemon.fleet))
        refusal, self.mistyped = self.mistyped, ""
        if not found:
            self._log_refusal(refusal)
        self._mistyped.report(
            {
                each.key: {
                    "key": each.key,
                    "found": each.found,
                    "wanted": each.wanted,
                    "fix": key_types.remedy(each.key),
                }
                for each in found
            }
        )

    def _record_duplicate(self, other: members.Heartbeat, now: float) -> None:
        """Process a heartbeat that another process has sent under this instance's name.

        Record it as a duplicate if it is alive, or as a predecessor to be removed if it is dead.
        """
        self.accepted = False
        info = other.info
        dead = self.silence.observe_duplicate(
            other.heartbeat_unix_ms, now, leaving=bool(info.get("leaving"))
        )
        # This process now holds the lock. So if the other one held the same lock, it has exited
        # together with all its child processes.
        if dead or info.get("lock") == self._lock_id:
            self.duplicate, self.predecessor_nonce = {}, str(info.get("nonce", ""))
            return
        self.duplicate = members.process_fields(other)
        if info.get("nonce") != self._duplicate_nonce:
            self._duplicate_nonce = info.get("nonce")
            logs.event(
                "instance.duplicated",
                logging.WARNING,
                instance=self.daemon.instance,
                **self.duplicate,
            )

    def _parse_member(
        self, member: members.Heartbeat, invalid: list[InvalidValueError]
    ) -> MemberView:
        try:
            return members.parse_member(member, self._keys.info(self.daemon.fleet))
        except InvalidValueError as error:
            invalid.append(error)
            return members.to_member_view(member)

    def predecessor_removal(self) -> Call:
        """Return the call that removes a dead predecessor now, before its heartbeat expires."""
        return members.leave(
            self._keys, self.daemon.fleet, self.daemon.instance, self.predecessor_nonce
        )

    def departure(self) -> Call:
        """Return the call that removes this instance from the fleet."""
        return members.leave(self._keys, self.daemon.fleet, self.daemon.instance, self._nonce)
