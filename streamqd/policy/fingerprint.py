"""Fingerprints of failures: the exception's class, the user's frame and the handler.

Neither the text of the exception nor a line number is included: texts contain order and user IDs,
and line numbers change with every edit.
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
        theirs = _FOREIGN.search(path) is None
        if theirs or not own:
            found, own = f"{path.rpartition('/')[2]}:{function}", own or theirs
    return found


def frame_of(traceback: str) -> str:
    """Return the innermost frame of user code in the text of a traceback, '' for none."""
    # The causes of an exception come first in its text, the exception itself last.
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    return innermost((found[1], found[2]) for found in _FRAME.finditer(last))


def of_dead_letter(fields: Mapping[bytes, bytes]) -> str:
    """Return the fingerprint of a dead letter: its recorded one, or one made from its fields.

    Dead letters without a recorded one were written by hand or never ran. Without a class or a
    signal, the reason takes the place of the class.
    """

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    recorded = text(b"fingerprint")
    if recorded:
        return recorded
    kind = text(b"errorClass") or text(b"signal") or text(b"reason")
    return fingerprint(kind, frame_of(text(b"traceback")), text(b"handler"))
