"""Writing down who has done what to a topic, for verbs that cannot be undone."""

from __future__ import annotations

from typing import Any

from streamqd.admin import audit
from streamqd.cli.session import Session
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store.client import Connection

NOT_AUDITED = "the audit trail could not be written: this is not in it"


def remember(
    session: Session,
    link: Connection,
    topic: str,
    verb: str,
    what: dict[str, Any],
    counts: dict[str, int],
) -> None:
    """Write an entry into the audit trail of a topic; say so when that fails: the deed is done."""
    try:
        audit.record(link, session.keys, topic, verb, what=what, counts=counts)
    except (RedisUnavailable, RedisRefused):
        session.note(NOT_AUDITED)
