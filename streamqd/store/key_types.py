"""Check the types of keys without the command TYPE, which would require another permission.

Instead, this module runs commands that return the length of a value, such as HLEN for a hash. They
fail with WRONGTYPE for any other type, and the daemon needs permission for them anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamqd.errors import InvalidValueError, RedisResponseError
from streamqd.store.client import Connection

_LENGTHS = {
    "HLEN": "a hash",
    "ZCARD": "a sorted set",
    "SCARD": "a set",
    "STRLEN": "a string",
    "XLEN": "a stream",
}
HASH, SORTED_SET, SET = "a hash", "a sorted set", "a set"


def find_mistyped(link: Connection, wanted: Mapping[str, str]) -> list[InvalidValueError]:
    """Return an error for each key whose value has the wrong type.

    `wanted` maps each key to its expected type, such as HASH. A key that does not exist is correct.
    The error names the actual type if it is one of those in this module and if this user may run
    the command that detects it, and "another type" otherwise. This takes one round trip.
    """
    commands = [(command, key) for key in wanted for command in _LENGTHS]
    replies = iter(link.pipeline(commands))
    found = []
    for key, expected in wanted.items():
        answers = dict(zip(_LENGTHS.values(), replies, strict=False))
        if _is_mistyped(answers[expected]):
            fits = [kind for kind, answer in answers.items() if not isinstance(answer, Exception)]
            found.append(InvalidValueError(key, "", fits[0] if fits else "another type", expected))
    return found


def _is_mistyped(answer: object) -> bool:
    return isinstance(answer, RedisResponseError) and answer.code == "WRONGTYPE"


def is_of_type(error: RedisResponseError) -> bool:
    """Return True if a command or a script failed because a key has the wrong type.

    The whole text is searched, because Redis 6.2 does not start the error of a script with the code
    of the failed command.
    """
    return "WRONGTYPE" in str(error)


def remedy(key: str) -> str:
    """Return the advice to show for a key of the wrong type."""
    return f"find the client that writes {key}, then run: redis-cli RENAME '{key}' '{key}:other'"
