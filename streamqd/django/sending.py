"""Sends messages from a Django project, with its settings and over its database connections."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings as project
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS, connections

from streamqd import config
from streamqd.outbox.outbox import Outbox
from streamqd.producer import Producer

SETTING = "STREAMQD"


def send(
    topic: str,
    value: Any,
    *,
    using: str = DEFAULT_DB_ALIAS,
    key: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    partition: int | None = None,
    delay: float | timedelta | None = None,
    at: float | datetime | None = None,
    expires: float | timedelta | datetime | None = None,
) -> str:
    """Send a message in the open transaction of the database `using`, and return its ID.

    The call executes one INSERT into the outbox, so the message is sent if and only if the
    transaction commits. Redis is not used. The arguments, the ID and the errors are the same as for
    `Outbox.send`. Outside `transaction.atomic`, the call is refused.
    """
    return outbox().send(
        connections[using],
        topic,
        value,
        key=key,
        headers=headers,
        partition=partition,
        delay=delay,
        at=at,
        expires=expires,
    )


@functools.cache
def outbox() -> Outbox:
    """Return the outbox of this process. Raises ConfigError if the setting STREAMQD is invalid."""
    return Outbox(settings=_settings())


@functools.cache
def producer() -> Producer:
    """Return the producer of this process, which sends messages directly to Redis.

    All threads may use it. Raises ConfigError if the setting STREAMQD is invalid.
    """
    return Producer(settings=_settings())


def _settings() -> config.Settings:
    return config.load_given(getattr(project, SETTING, None), SETTING)


def _forget(*, setting: str, **_: object) -> None:
    if setting == SETTING:
        outbox.cache_clear()
        producer.cache_clear()


setting_changed.connect(_forget)  # for `override_settings` in tests
