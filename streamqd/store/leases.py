"""The lease of a unit: taking, keeping and giving back the right to settle its messages.

Called by the supervisor. Each function builds a call; durations are seconds here and milliseconds
in the scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from streamqd.errors import ContractError
from streamqd.model import ENTRIES_MAX, Lease, Unit
from streamqd.store import scripts, untrusted
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

FENCE = "the fence of a partition"  # where nobody has said which one it is


def acquire(
    keys: Keys,
    lease: Lease,
    ttl: float,
    owner: str,
    dead_token: str = "",
) -> Call:
    """Take the unit if it is free and nobody has owned it since `lease.epoch` was read.

    Its token is new; the same call may be repeated until it is answered. `dead_token` is that of a
    predecessor whose processes are all proven dead, or of an owner that has been silent for longer
    than a lease lives, which by a clock that was set back has not ended.
    """
    return scripts.on(
        "lease_acquire",
        keys,
        lease.unit,
        token=lease.token,
        seen_epoch=lease.epoch,
        ttl_ms=_ttl_ms(ttl),
        owner=owner,
        dead_token=dead_token,
    )


def renew(keys: Keys, lease: Lease, ttl: float) -> Call:
    """Let the lease live for `ttl` seconds from now."""
    return scripts.on("lease_renew", keys, lease.unit, token=lease.token, ttl_ms=_ttl_ms(ttl))


def refence(
    keys: Keys,
    lease: Lease,
    new: str,
    ttl: float,
    charged: bytes | None,
    context: bytes,
    done: Sequence[bytes],
) -> Call:
    """Replace the token of a dead worker by `new`, in one step for everything that it left.

    Acknowledges the places in `done` (at most ENTRIES_MAX, all that a worker can hold) and charges
    a crash to `charged`; None charges nobody. Raises ContractError if the tokens are equal or
    `done` is too long.
    """
    if lease.token == new:
        raise ContractError("lease_refence: the new token is the old one")
    if len(done) > ENTRIES_MAX:
        raise ContractError(f"lease_refence: {len(done)} places, at most {ENTRIES_MAX} are allowed")
    return scripts.on(
        "lease_refence",
        keys,
        lease.unit,
        old=lease.token,
        new=new,
        ttl_ms=_ttl_ms(ttl),
        charged=charged or b"",
        context=context,
        done=done,
    )


def release(keys: Keys, lease: Lease) -> Call:
    """Give the unit back. The token is dead as soon as this was sent."""
    return scripts.on("lease_release", keys, lease.unit, token=lease.token)


class Acquired(NamedTuple):
    """What a taken lease is. `victim` is the place charged with a crash, b'' for none."""

    epoch: int
    unclean: bool  # the last owner did not release: pending entries run in solo mode
    victim: bytes

    @classmethod
    def parse(cls, reply: Reply) -> Acquired:
        """Read OK or MINE. After MINE nobody is charged anew."""
        victim = reply.rest[2] if reply.word == "OK" else b""
        return cls(untrusted.integer(reply.rest[0], FENCE, "epoch"), bool(reply.rest[1]), victim)

    def log_fields(self) -> dict[str, Any]:
        """Return what the log says of it. `suspected`: the place that was charged."""
        suspected = untrusted.label(self.victim) or None
        return {"epoch": self.epoch, "inherited": self.unclean, "suspected": suspected}


class LeaseView(NamedTuple):
    """Fence and lease as they were read together; decides nothing by itself."""

    token: str
    """'' when nobody holds the unit."""
    epoch: int
    """0 when nobody ever held it."""
    owner: str
    since_unix_ms: int
    solo: bool
    ttl: float | None
    """Seconds that the lease lives; None when there is none."""

    @classmethod
    def parse(cls, fence: Sequence[bytes | None], ttl_ms: int, key: str = FENCE) -> LeaseView:
        """Read the two replies to the commands of `view`. Raises BadValue, of the fence's `key`."""
        token, epoch, owner, since, solo = fence
        return cls(
            token=untrusted.label(token or b""),
            epoch=untrusted.integer(epoch, key, "epoch", default=0),
            owner=untrusted.label(owner or b""),
            since_unix_ms=untrusted.integer(since, key, "since", default=0),
            solo=solo is not None,
            ttl=ttl_ms / 1000 if ttl_ms >= 0 else None,
        )


def view(keys: Keys, unit: Unit) -> list[tuple[Any, ...]]:
    """Build the two commands whose replies `LeaseView.parse` takes."""
    return [
        ("HMGET", keys.fence(*unit), "token", "epoch", "owner", "since", "solo"),
        ("PTTL", keys.lease(*unit)),
    ]


def glance(keys: Keys, unit: Unit) -> tuple[Any, ...]:
    """Build the command whose reply is the token of the lease, None when there is no lease."""
    return ("GET", keys.lease(*unit))


def _ttl_ms(ttl: float) -> int:
    ttl_ms = round(ttl * 1000)
    if ttl_ms < 1:
        raise ContractError(f"a lease of {ttl} s")
    return ttl_ms
