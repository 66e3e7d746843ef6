"""What several replies say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from streamqd.errors import RedisRefused, RedisUnavailable, RefusalKind

_T = TypeVar("_T")


def accepted(replies: Sequence[Any]) -> Sequence[Any]:
    """The replies. Raises the first RedisRefused among them."""
    for reply in replies:
        if isinstance(reply, RedisRefused):
            raise reply
    return replies


def whole(answers: Sequence[_T | RedisUnavailable]) -> list[_T]:
    """The answers, all of which came; raises the RedisUnavailable of one that did not."""
    there = [each for each in answers if not isinstance(each, RedisUnavailable)]
    if len(there) < len(answers):
        raise missing_of(answers)
    return there


def missing_of(answers: Sequence[Any]) -> RedisUnavailable:
    """One error for answers of which some did not come: others may have been executed."""
    lost = [each for each in answers if isinstance(each, RedisUnavailable)]
    sent = len(lost) < len(answers) or any(each.sent for each in lost)
    return RedisUnavailable(str(lost[0]), sent=sent)


def kind_of(reply: Any) -> RefusalKind | None:
    """Why a reply is a refusal; None when it is none."""
    return reply.kind if isinstance(reply, RedisRefused) else None
