"""Compute fingerprints of failures from the exception's class, the user's frame and the handler.

The text of the exception and the line number are not included, because texts contain IDs, and line
numbers change with every edit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

LENGTH = 12  # hexadecimal digits

# Code that the user called but did not write. All other code is the user's own.
_FOREIGN = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[.\d]*/|^<frozen ")
_FRAME = re.compile(r'^  File "([^"\n]+)", line \d+, in (.+)$', re.MULTILINE)


def fingerprint(error_type: str, frame: str, handler: str) -> str:
    """Return the short, stable fingerprint of a failure, by which `dlq stats` groups.

    `error_type` is the exception's class with its module, or how the process died. `frame` is
    `file:function` as `innermost` returns it, '' for none. `handler` is `module:function`.
    """
    raw = f"{error_type}|{frame}|{handler}"
    # A path may contain bytes that are not text and cannot be encoded.
    return hashlib.sha256(raw.encode("utf-8", "backslashreplace")).hexdigest()[:LENGTH]


def innermost(frames: Iterable[tuple[str, str]]) -> str:
    """Return `file:function` of the innermost frame of user code, or else of the innermost frame.

    `frames` are (path, function), the outermost first. Return '' without frames.
    """
    found, own = "", False
    for path, function in frames:
        is_user_code = _FOREIGN.search(path) is None
        if is_user_code or not own:
            found, own = f"{path.rpartition('/')[2]}:{function}", own or is_user_code
    return found


def frame_of(traceback: str) -> str:
    """Return the innermost frame of user code in the text of a traceback, '' for none."""
    # The causes of an exception come first in its text, the exception itself last.
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    return innermost((found[1], found[2]) for found in _FRAME.finditer(last))


def dead_letter_fingerprint(fields: Mapping[bytes, bytes]) -> str:
    """Return the recorded fingerprint of a dead letter, or compute it from the fields.

    A dead letter without a recorded one never ran, or another client wrote it. If it has neither
    an exception class nor a signal, the reason is used instead of the class.
    """

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    recorded = text(b"fingerprint")
    if recorded:
        return recorded
    kind = text(b"errorClass") or text(b"signal") or text(b"reason")
    return fingerprint(kind, frame_of(text(b"traceback")), text(b"handler"))
