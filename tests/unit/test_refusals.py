"""The first word of an error reply decides which kind of error it is."""

from __future__ import annotations

import pytest

from streamqd.errors import RedisResponseError, RefusalKind

TRANSIENT = [
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "BUSY",
    "READONLY",
    "MOVED",
    "ASK",
    "NOREPLICAS",
]
LASTING = [
    "OOM",
    "MISCONF",
    "NOAUTH",
    "WRONGPASS",
    "NOPERM",
    "NOGROUP",
    "NOSCRIPT",
    "ERR",
    "WRONGTYPE",
    "BADVALUE",
]


def test_every_error_code_has_one_kind() -> None:
    words = [word for kind in RefusalKind for word in kind.value if kind is not RefusalKind.OTHER]
    assert sorted(words) == sorted({*words}) == sorted(TRANSIENT + LASTING)


@pytest.mark.parametrize("code", TRANSIENT)
def test_temporary_server_errors_are_transient(code: str) -> None:
    assert RedisResponseError(code, "x").transient


@pytest.mark.parametrize("code", [*LASTING, "DELETING", "", "oom"])
def test_other_server_errors_are_not_transient(code: str) -> None:
    assert not RedisResponseError(code, "x").transient


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("LOADING", RefusalKind.NOT_READY),
        ("READONLY", RefusalKind.REPLICA),
        ("ASK", RefusalKind.MOVED),
        ("MISCONF", RefusalKind.FULL),
        ("WRONGPASS", RefusalKind.LOGIN),
        ("WRONGTYPE", RefusalKind.BAD_KEY_OR_COMMAND),
        ("DELETING", RefusalKind.OTHER),
    ],
)
def test_refusal_has_the_kind_of_its_code(code: str, kind: RefusalKind) -> None:
    assert RedisResponseError(code, "x").kind is kind
