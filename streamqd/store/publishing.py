"""Writing messages that need more than a plain XADD: dedup ids, backlog limits, delays.

Called by producers. Each function builds a call; `fields` are flat: name, value, name, value …
"""

from __future__ import annotations

from collections.abc import Sequence

from streamqd.errors import ContractError
from streamqd.store import scripts
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call

FIELDS_MAX = 128  # names and values of one message at most


def publish(
    keys: Keys,
    topic: str,
    partition: int,
    fields: Sequence[bytes | str],
    dedup_id: str = "",
    window: float = 0.0,
    max_backlog: int | None = None,
) -> Call:
    """Write a message unless its dedup id was used within `window` seconds, or too many wait."""
    if max_backlog is not None and max_backlog < 1:
        raise ContractError(f"message_publish: a limit of {max_backlog}")
    named = {"stream": keys.stream(topic, partition)}
    if dedup_id:
        named["dedup"] = keys.dedup(topic, partition, dedup_id)
    return scripts.get("message_publish").call(
        named,
        window_ms=_window_ms(dedup_id, window),
        max_backlog=-1 if max_backlog is None else max_backlog,
        fields=_paired(fields),
    )


def schedule(
    keys: Keys,
    topic: str,
    partition: int,
    delay: float | None,
    send_id: str,
    fields: Sequence[bytes | str],
    dedup_id: str = "",
    window: float = 0.0,
    *,
    at_unix_ms: int | None = None,
) -> Call:
    """Keep a message for `delay` seconds, or until an instant.

    `send_id` is new, or that of the very same send.
    """
    one_time = (delay is None) != (at_unix_ms is None)
    if not send_id or not one_time or min(delay or 0, at_unix_ms or 0) < 0:
        raise ContractError(
            f"message_schedule: send id {send_id!r}, delay {delay} s, at {at_unix_ms} ms"
        )
    named = {
        "scheduled": keys.scheduled(topic, partition),
        "items": keys.scheduled_items(topic, partition),
    }
    if dedup_id:
        named["dedup"] = keys.dedup(topic, partition, dedup_id)
    return scripts.get("message_schedule").call(
        named,
        delay_ms=0 if delay is None else round(delay * 1000),
        at_ms=-1 if at_unix_ms is None else at_unix_ms,
        send_id=send_id,
        window_ms=_window_ms(dedup_id, window),
        # The entry that comes of it tells by which name it was sent.
        fields=[*_paired(fields), "sendId", send_id],
    )


def _paired(fields: Sequence[bytes | str]) -> Sequence[bytes | str]:
    if not fields or len(fields) % 2 or len(fields) > FIELDS_MAX:
        raise ContractError(f"a message of {len(fields)} names and values")
    return fields


def _window_ms(dedup_id: str, window: float) -> int:
    window_ms = round(window * 1000)
    if dedup_id and window_ms < 1:
        raise ContractError(f"a dedup window of {window} s")
    return window_ms
