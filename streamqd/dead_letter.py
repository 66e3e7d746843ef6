"""What a dead letter tells besides its message: why, where and when it died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_DIGITS_MAX = 18  # of a number; a longer one is nothing that streamqd has written


# Why a message is dead: every word that `reason` can be.
REASONS = (
    "attempts",
    "crashes",
    "dead",
    "undecodable",
    "too-old",
    "too-large",
    "not-retried",
    "cancelled",
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The end of a message, as the group that gave it up has written it down.

    Texts are '' and numbers 0 or None where nothing is known. `dlq_error` of that group says how
    much of an exception is kept.
    """

    group: str
    """The group that gave it up; others may have handled the same message."""
    reason: str
    """A stable word: dead, undecodable, attempts, crashes, too-old, too-large … or cancelled."""
    error_class: str
    """Qualified name of the exception's class, '' after crashes."""
    error: str
    """What the exception said, or how the process ended."""
    traceback: str
    attempts: int
    """Runs that failed."""
    crashes: int
    """Runs that killed their process."""
    handler: str
    """`module:function`."""
    instance: str
    """The instance on which it was given up."""
    fingerprint: str
    """The same for the same failure, as `dlq stats` groups by it."""
    failed_at: float
    """Unix seconds by the server's clock."""
    signal: str
    """Name or number of the signal that ended the process, '' for none."""
    exit_code: int | None
    """Exit code of the process, None when it did not exit by itself."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> DeadLetter:
        """Read the fields of an entry of the dead-letter stream. Never raises."""

        def text(name: bytes) -> str:
            return fields.get(name, b"").decode("utf-8", "replace")

        def number(name: bytes) -> int | None:
            raw = fields.get(name, b"")
            return int(raw) if raw.isdigit() and len(raw) <= _DIGITS_MAX else None

        return cls(
            group=text(b"group"),
            reason=text(b"reason"),
            error_class=text(b"errorClass"),
            error=text(b"errorMessage"),
            traceback=text(b"traceback"),
            attempts=number(b"attempts") or 0,
            crashes=number(b"crashes") or 0,
            handler=text(b"handler"),
            instance=text(b"instance"),
            fingerprint=text(b"fingerprint"),
            failed_at=(number(b"failedAt") or 0) / 1000,
            signal=text(b"signal"),
            exit_code=number(b"exitCode"),
        )
