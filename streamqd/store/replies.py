"""Evaluate several replies together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.store.scripts import Reply

_T = TypeVar("_T")


def check_replies(replies: Sequence[Any]) -> Sequence[Any]:
    """Return the replies. Raises the first RedisResponseError among them."""
    for reply in replies:
        if isinstance(reply, RedisResponseError):
            raise reply
    return replies


@overload
def check_valid(answer: Reply | ContractError) -> Reply: ...


@overload
def check_valid(
    answer: Reply | RedisResponseError | ContractError,
) -> Reply | RedisResponseError: ...


def check_valid(answer: Reply | RedisResponseError | ContractError) -> Reply | RedisResponseError:
    """Return an answer. Raises it if it is a ContractError."""
    if isinstance(answer, ContractError):
        raise answer
    return answer


def require_all(answers: Sequence[_T | RedisUnavailableError]) -> list[_T]:
    """Return the answers if none is missing. Raises the RedisUnavailableError of a missing one."""
    there = [each for each in answers if not isinstance(each, RedisUnavailableError)]
    if len(there) < len(answers):
        raise missing_of(answers)
    return there


def missing_of(answers: Sequence[Any]) -> RedisUnavailableError:
    """Return one error for missing answers. `sent` is True if any command may have run."""
    lost = [each for each in answers if isinstance(each, RedisUnavailableError)]
    sent = len(lost) < len(answers) or any(each.sent for each in lost)
    return RedisUnavailableError(str(lost[0]), sent=sent)


def kind_of(reply: Any) -> RefusalKind | None:
    """Return the kind of a refusal, or None for any other reply."""
    return reply.kind if isinstance(reply, RedisResponseError) else None
