"""Check replies for errors, and combine the errors of several replies into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from streamqd.errors import ContractError, RedisResponseError, RedisUnavailableError, RefusalKind
from streamqd.store.scripts import Reply

_T = TypeVar("_T")


def check_replies(replies: Sequence[Any]) -> Sequence[Any]:
    """Return the replies if none is an error. Raises the first RedisResponseError among them."""
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
    """Return an answer, or raise it if it is a ContractError."""
    if isinstance(answer, ContractError):
        raise answer
    return answer


def require_all(answers: Sequence[_T | RedisUnavailableError]) -> list[_T]:
    """Return the answers if none is missing. Otherwise, raise the error of `merge_missing`."""
    there = [each for each in answers if not isinstance(each, RedisUnavailableError)]
    if len(there) < len(answers):
        raise merge_missing(answers)
    return there


def merge_missing(answers: Sequence[Any]) -> RedisUnavailableError:
    """Return a single error for the missing answers, with the text of the first one.

    Its `sent` is True if any command was answered or may have run.
    """
    lost = [each for each in answers if isinstance(each, RedisUnavailableError)]
    sent = len(lost) < len(answers) or any(each.sent for each in lost)
    return RedisUnavailableError(str(lost[0]), sent=sent)


def refusal_kind(reply: Any) -> RefusalKind | None:
    """Return the kind of refusal if the reply is an error, or None for any other reply."""
    return reply.kind if isinstance(reply, RedisResponseError) else None
