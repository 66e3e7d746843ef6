"""The details of a dead letter: why, where and when a group gave the message up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_DIGITS_MAX = 18  # maximum number of digits, because streamqd never writes a longer number


# All values of `reason`, which states why a message was dead-lettered.
REASONS = (
    "attempts",
    "crashes",
    "dead",
    "undecodable",
    "too-old",
    "too-large",
    "not-retried",
    "canceled",
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The details of a dead letter, as recorded by the group that dead-lettered the message.

    Unknown strings are '', and unknown numbers are 0 or None. The consumer's `dlq_error` setting
    determines how much of the exception is stored.
    """

    group: str
    """The group that dead-lettered the message. Other groups may have handled it."""
    reason: str
    """The reason why the message was dead-lettered.

    attempts: it failed `max_attempts` times. crashes: it crashed its process `max_crashes` times.
    dead: the handler raised `Dead`. undecodable: the payload does not match the handler's type
    annotation. too-old: it failed when it was older than `retry_max_age`. too-large: it is larger
    than `max_message_bytes`. not-retried: the consumer does not retry this exception. canceled: an
    operator canceled its retry.
    """
    error_class: str
    """The qualified name of the exception's class, or '' after a crash."""
    error: str
    """The message of the exception, or a description of the process's exit."""
    traceback: str
    """The traceback of the exception."""
    attempts: int
    """The number of failed runs."""
    crashes: int
    """The number of runs that crashed their process."""
    handler: str
    """The handler, as `module:function`."""
    instance: str
    """The instance that dead-lettered the message."""
    fingerprint: str
    """The short name of the failure. `streamqd dlq stats` counts dead letters by it."""
    failed_at: float
    """The time at which the message was dead-lettered, in unix seconds on the server's clock."""
    signal: str
    """The name or number of the signal that killed the process, or '' if there was none."""
    exit_code: int | None
    """The exit code of the process, or None if it did not exit on its own."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> DeadLetter:
        """Return the details in the fields of a dead-letter entry. Never raises."""

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
