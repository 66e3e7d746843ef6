"""Script calls that acquire, renew and release the lease of an assignment.

The supervisor uses these calls. Durations are in seconds here, but in milliseconds in the scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streamqd.errors import ContractError, InvalidValueError
from streamqd.model import ENTRIES_MAX, Assignment, Lease
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

_EVENTS = (b"acquired", b"inherited", b"released", b"reset")
CHANGES_MAX = 40  # number of owner changes that are stored, the same as in lua/_owner_changes.lua
FENCE = "the fence of a partition"  # label for errors if the caller passes no key


def acquire(
    keys: Keys,
    lease: Lease,
    ttl: float,
    owner: str,
    dead_token: str = "",
) -> Call:
    """Acquire an assignment if it is free.

    The call is refused if another owner has acquired the assignment since the caller read
    `lease.epoch`. The token of `lease` must be new. If the reply is lost, repeat the same call
    until it is answered.

    `dead_token` is the token of an earlier owner whose lease the call may take over, or ''. Pass it
    if all processes of that owner have exited, or if the owner was silent for longer than a lease
    lasts. The lease of a silent owner can still exist if the server's clock was set back.
    """
    return scripts.build_call(
        "lease_acquire",
        keys,
        lease.assignment,
        token=lease.token,
        seen_epoch=lease.epoch,
        ttl_ms=_ttl_ms(ttl),
        owner=owner,
        dead_token=dead_token,
    )


def renew(keys: Keys, lease: Lease, ttl: float) -> Call:
    """Extend the lease of an assignment to `ttl` seconds from now."""
    return scripts.build_call(
        "lease_renew", keys, lease.assignment, token=lease.token, ttl_ms=_ttl_ms(ttl)
    )


def refence(
    keys: Keys,
    lease: Lease,
    new: str,
    ttl: float,
    charged: bytes | None,
    context: bytes,
    done: Sequence[bytes],
) -> Call:
    """Replace the token of an exited worker with the token `new` of its successor.

    In the same step, the call acknowledges the entries in `done`, which the worker had finished,
    and charges a crash to the entry `charged`, unless it is None. Both are given as places (see
    `messages.entry_place`). `context` describes the crash. Raises ContractError if `done` has more
    entries than a worker can have in flight (ENTRIES_MAX), or if the two tokens are equal.
    """
    if lease.token == new:
        raise ContractError("lease_refence: the new token is the old one")
    if len(done) > ENTRIES_MAX:
        raise ContractError(f"lease_refence: {len(done)} places, at most {ENTRIES_MAX} are allowed")
    return scripts.build_call(
        "lease_refence",
        keys,
        lease.assignment,
        old=lease.token,
        new=new,
        ttl_ms=_ttl_ms(ttl),
        charged=charged or b"",
        context=context,
        done=done,
    )


def release(keys: Keys, lease: Lease, reason: str = "") -> Call:
    """Release the assignment. Do not use its token any more once this call has been sent.

    `reason` is recorded with the change of owner. It is '' if the reason is unknown.
    """
    return scripts.build_call(
        "lease_release", keys, lease.assignment, token=lease.token, reason=reason
    )


class Acquired(NamedTuple):
    """The result of acquiring a lease.

    `victim` is the place of the entry that the call charged with a crash, or b'' if there is none.
    """

    epoch: int
    unclean: bool  # True if the last owner did not release it, so pending entries are quarantined
    victim: bytes

    @classmethod
    def parse(cls, reply: Reply) -> Acquired:
        """Parse an OK or MINE reply.

        MINE means that an earlier copy of the call has already acquired the lease. The repeated
        call charges no entry, so `victim` is then b''.
        """
        victim = reply.values[2] if reply.word == "OK" else b""
        return cls(parse_epoch(reply), bool(reply.values[1]), victim)

    def log_fields(self) -> dict[str, Any]:
        """Return the fields for log events. In these, `victim` is called `suspected`."""
        suspected = untrusted.label(self.victim) or None
        return {"epoch": self.epoch, "inherited": self.unclean, "suspected": suspected}


def parse_epoch(reply: Reply) -> int:
    """Return the epoch from an OK or MINE reply to `acquire`, or from an OK reply to `refence`.

    Raises ContractError if it is not a valid number, which would be a bug in the script.
    """
    try:
        return untrusted.integer(reply.values[0], FENCE, "epoch")
    except InvalidValueError as error:
        raise ContractError(f"a reply of a lease script: {error}") from None


class LeaseView(NamedTuple):
    """The fence and the lease of an assignment, which may have changed since they were read."""

    token: str
    """Token of the owner, or '' if no instance owns the assignment."""
    epoch: int
    """Epoch of the current or last owner, or 0 if the assignment never had an owner."""
    owner: str
    since_unix_ms: int
    quarantine: bool
    ttl: float | None
    """Seconds until the lease expires, or None if there is no lease."""

    @classmethod
    def parse(cls, fence: Sequence[bytes | None], ttl_ms: int, key: str = FENCE) -> LeaseView:
        """Parse the replies to the commands of `view_commands`.

        `key` is the fence's key, for error messages. Raises InvalidValueError if a field of the
        fence is invalid.
        """
        token, epoch, owner, since, quarantine = fence
        return cls(
            token=untrusted.label(token or b""),
            epoch=untrusted.integer(epoch, key, "epoch", default=0),
            owner=untrusted.label(owner or b""),
            since_unix_ms=untrusted.integer(since, key, "since", default=0),
            quarantine=quarantine is not None,
            ttl=ttl_ms / 1000 if ttl_ms >= 0 else None,
        )


def view_commands(keys: Keys, assignment: Assignment) -> list[tuple[Any, ...]]:
    """Return the two commands whose replies `LeaseView.parse` parses."""
    return [
        ("HMGET", keys.fence(*assignment), "token", "epoch", "owner", "since", "quarantine"),
        ("PTTL", keys.lease(*assignment)),
    ]


def token_command(keys: Keys, assignment: Assignment) -> tuple[Any, ...]:
    """Return the command that reads the lease's token. Its reply is None if there is no lease."""
    return ("GET", keys.lease(*assignment))


class OwnerChange(NamedTuple):
    """One change of owner.

    `other` is the previous owner if it lost the assignment, or the reason if the owner released it.
    """

    at_unix_ms: int
    event: str
    epoch: int
    owner: str
    other: str

    @classmethod
    def parse(cls, raw: bytes, key: str) -> OwnerChange:
        """Parse an element of the list, which has the form `unix-ms event epoch owner other`.

        Raises InvalidValueError if the element does not have this form.
        """
        parts = raw.split(b" ")
        if len(parts) != 5 or parts[1] not in _EVENTS:
            raise InvalidValueError(key, "", untrusted.format_value(raw), "a change of owner")
        at, event, epoch, owner, other = parts
        return cls(
            untrusted.integer(at, key),
            event.decode(),
            untrusted.integer(epoch, key),
            untrusted.label(owner),
            untrusted.label(other),
        )


def owner_changes_command(keys: Keys, assignment: Assignment) -> tuple[Any, ...]:
    """Return the command that reads the last changes of owner, oldest first."""
    return ("LRANGE", keys.epochs(*assignment), -CHANGES_MAX, -1)


def _ttl_ms(ttl: float) -> int:
    ttl_ms = round(ttl * 1000)
    if ttl_ms < 1:
        raise ContractError(f"a lease of {ttl} s")
    return ttl_ms
