"""Check the types of keys without the command TYPE, which would require another permission.

For each key, run the command of its type that returns the length. The daemon needs these commands
anyway.
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
    """Return the keys that exist with a type other than `wanted`. One round trip.

    A list or a module type counts as another type. So does a key for which this user may not run
    the command.
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
    """Return True if a command or a script met a key of the wrong type.

    For a command inside a script, Redis 6.2 reports the code only within the text.
    """
    return "WRONGTYPE" in str(error)


def remedy(key: str) -> str:
    """Return the advice for a key of a wrong type."""
    return f"find the client that writes {key}, then run: redis-cli RENAME '{key}' '{key}:other'"
