"""Compute fingerprints that group failures with the same cause.

A fingerprint depends on the class of the exception, the innermost frame of user code, and the
handler. It does not depend on the text of the exception, which often contains IDs, or on the line
number, which changes with every edit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

LENGTH = 12  # number of hexadecimal digits in a fingerprint

# The paths of code that the user called but did not write. All other code is the user's own.
_FOREIGN = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[.\d]*/|^<frozen ")
_FRAME = re.compile(r'^  File "([^"\n]+)", line \d+, in (.+)$', re.MULTILINE)


def fingerprint(error_type: str, frame: str, handler: str) -> str:
    """Return the fingerprint of a failure. The command `dlq stats` groups dead letters by it.

    `error_type` is the class of the exception with its module, or the way in which the process
    died. `frame` is `file:function`, as `innermost_frame` returns it, or ''. `handler` is
    `module:function`.
    """
    raw = f"{error_type}|{frame}|{handler}"
    # A path may contain bytes that are not text and cannot be encoded.
    return hashlib.sha256(raw.encode("utf-8", "backslashreplace")).hexdigest()[:LENGTH]


def innermost_frame(frames: Iterable[tuple[str, str]]) -> str:
    """Return `file:function` of the innermost frame that is user code.

    If there is no user code, return that of the innermost frame, or '' if there are no frames. Each
    frame is a pair of a path and a function. The outermost frame comes first.
    """
    found, own = "", False
    for path, function in frames:
        is_user_code = _FOREIGN.search(path) is None
        if is_user_code or not own:
            found, own = f"{path.rpartition('/')[2]}:{function}", own or is_user_code
    return found


def innermost_user_frame(traceback: str) -> str:
    """Return the innermost frame of user code in the text of a traceback, or ''."""
    # The text starts with the causes of the exception, and the exception itself comes last.
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    return innermost_frame((found[1], found[2]) for found in _FRAME.finditer(last))


def dead_letter_fingerprint(fields: Mapping[bytes, bytes]) -> str:
    """Return the fingerprint of a dead letter.

    If none is recorded, because the message never ran or another client wrote the dead letter, the
    fingerprint is computed from the fields. If there is neither an exception class nor a signal,
    the reason is used in their place.
    """

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    recorded = text(b"fingerprint")
    if recorded:
        return recorded
    kind = text(b"errorClass") or text(b"signal") or text(b"reason")
    return fingerprint(kind, innermost_user_frame(text(b"traceback")), text(b"handler"))
