"""Fingerprints decide when two failures count as the same failure."""

from __future__ import annotations

import json
import re

import pytest

from streamqd import handlers
from streamqd.policy.fingerprint import dead_letter_fingerprint, fingerprint, innermost_frame

TEXT = """Traceback (most recent call last):
  File "/srv/shop/orders.py", line 10, in pay
    charge(order)
  File "/srv/shop/bank.py", line 44, in charge
    return json.loads(answer)
  File "/usr/lib/python3.12/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
ValueError: no
"""


def test_fingerprint_is_short_stable_and_hexadecimal() -> None:
    found = fingerprint("ValueError", "bank.py:charge", "orders:pay")

    assert re.fullmatch("[0-9a-f]{12}", found)
    assert found == fingerprint("ValueError", "bank.py:charge", "orders:pay")


@pytest.mark.parametrize(
    "other",
    [
        ("KeyError", "bank.py:charge", "orders:pay"),
        ("ValueError", "bank.py:refund", "orders:pay"),
        ("ValueError", "bank.py:charge", "orders:ship"),
    ],
)
def test_fingerprint_depends_on_every_part(other: tuple[str, str, str]) -> None:
    assert fingerprint(*other) != fingerprint("ValueError", "bank.py:charge", "orders:pay")


def test_fingerprint_uses_the_innermost_user_frame() -> None:
    user = [("/srv/a.py", "go"), ("/srv/b.py", "load")]

    assert innermost_frame(user) == "b.py:load"
    for library in (
        "/usr/lib/python3.12/json/decoder.py",
        "/srv/venv/lib/python3.12/site-packages/requests/api.py",
        "/usr/lib/python3/dist-packages/yaml/__init__.py",
        "<frozen importlib._bootstrap>",
    ):
        assert innermost_frame([*user, (library, "decode")]) == "b.py:load"
        assert innermost_frame([(library, "outer"), (library, "inner")]).endswith(":inner")
    assert innermost_frame([]) == ""


def test_dead_letter_has_or_gets_a_fingerprint() -> None:
    told = {b"errorClass": b"ValueError", b"handler": b"orders:pay", b"traceback": TEXT.encode()}

    assert dead_letter_fingerprint(told) == fingerprint(
        "ValueError", "bank.py:charge", "orders:pay"
    )
    assert dead_letter_fingerprint(told | {b"fingerprint": b"abc"}) == "abc"
    cause = TEXT.replace("bank.py", "cause.py") + "\nDuring handling …:\n\n" + TEXT
    assert dead_letter_fingerprint(
        told | {b"traceback": cause.encode()}
    ) == dead_letter_fingerprint(told)
    assert dead_letter_fingerprint({b"reason": b"decode"}) == fingerprint("decode", "", "")


def test_computed_fingerprint_equals_that_of_the_worker() -> None:
    def handler() -> None:
        json.loads("{")

    try:
        handler()
    except ValueError as raised:
        error = raised
    failed = handlers.describe_failure(error, "traceback")
    fields = {
        b"errorClass": failed.error_class.encode(),
        b"traceback": failed.traceback.encode(),
        b"handler": b"m:handler",
    }

    assert dead_letter_fingerprint(fields) == handlers.Description(error).fingerprint("m:handler")
    assert dead_letter_fingerprint(fields) == fingerprint(
        "json.decoder.JSONDecodeError", "test_fingerprint.py:handler", "m:handler"
    )


def test_fingerprint_accepts_a_path_that_is_not_text() -> None:
    assert len(fingerprint("E", "\udcff.py:f", "")) == 12
