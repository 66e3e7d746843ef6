"""What counts as "the same failure": the exception's class, the user's frame, the handler.

Neither the text of the exception nor a line number is part of it: texts name orders and users, and
lines move with every edit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

LENGTH = 12  # hexadecimal digits

# Code that the user called but did not write. What is found in none of these places is theirs.
_FOREIGN = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[.\d]*/|^<frozen ")
_FRAME = re.compile(r'^  File "([^"\n]+)", line \d+, in (.+)$', re.MULTILINE)


def fingerprint(error_type: str, frame: str, handler: str) -> str:
    """Return the short stable name of a failure, as `dlq stats` groups by it.

    `error_type` is the exception's class with its module, or how the process ended; `frame` is
    `file:function` as `innermost` names it, '' when there is none; `handler` is `module:function`.
    """
    raw = f"{error_type}|{frame}|{handler}"
    # A path need not be text: it may hold what cannot be encoded.
    return hashlib.sha256(raw.encode("utf-8", "backslashreplace")).hexdigest()[:LENGTH]


def innermost(frames: Iterable[tuple[str, str]]) -> str:
    """Return `file:function` of the innermost frame of user code, else of the innermost frame.

    `frames` are (path, function), the outermost first. '' when there are none.
    """
    found, own = "", False
    for path, function in frames:
        theirs = _FOREIGN.search(path) is None
        if theirs or not own:
            found, own = f"{path.rpartition('/')[2]}:{function}", own or theirs
    return found


def frame_of(traceback: str) -> str:
    """Return the innermost frame of user code that the text of a traceback shows, '' for none."""
    # The causes of an exception come first in its text, the exception itself last.
    last = traceback.rpartition("Traceback (most recent call last):")[2]
    return innermost((found[1], found[2]) for found in _FRAME.finditer(last))


def of_letter(fields: Mapping[bytes, bytes]) -> str:
    """Return the fingerprint of a dead letter: the one that it tells, else one of its fields.

    Letters without one were written by hand, or were never run: then the reason stands for the
    class.
    """

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    recorded = text(b"fingerprint")
    if recorded:
        return recorded
    kind = text(b"errorClass") or text(b"signal") or text(b"reason")
    return fingerprint(kind, frame_of(text(b"traceback")), text(b"handler"))
