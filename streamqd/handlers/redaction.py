"""Remove private text from exceptions, with a hook in the handler's module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamqd.errors import HandlerLoadError
from streamqd.handlers.outcomes import TRACEBACK_BYTES_MAX
from streamqd.handlers.signatures import is_async
from streamqd.handlers.verdicts import SoftTimeout
from streamqd.model import Failed

HOOK = "redact_error"

Redact = Callable[[str], str]

TOO_SLOW = f"<{HOOK} failed: SoftTimeout>"


def find_hook(module: Any) -> Redact | None:
    """Return the hook of a module, or None if it has none.

    Raises HandlerLoadError if the hook is not a function, or if it is asynchronous.
    """
    found: Redact | None = getattr(module, HOOK, None)
    if found is not None and (not callable(found) or is_async(found)):
        name = getattr(module, "__name__", "the module")
        raise HandlerLoadError(f"{HOOK} of {name} must be a function, and not an async one")
    return found


def redact_failure(failure: Failed, hook: Redact | None) -> Failed:
    """Pass the texts of a failure through the hook, and return the new failure. Never raises.

    If the hook fails, the text is dropped, because it may contain private data.
    """
    if hook is None:
        return failure
    message = redact_text(failure.message, hook)
    if message == TOO_SLOW:
        return replace(failure, message=message, traceback=message)  # the hook would time out again
    return replace(failure, message=message, traceback=redact_text(failure.traceback, hook))


def redact_text(text: str, hook: Redact | None) -> str:
    """Pass one text of an exception through the hook, and return the result. Never raises.

    The result is cut to TRACEBACK_BYTES_MAX characters. If the hook fails, the result is a short
    note such as `TOO_SLOW`.
    """
    if hook is None or not text:
        return text
    try:
        found: object = hook(text)
    except SoftTimeout:
        return TOO_SLOW
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        return f"<{HOOK} failed: {type(error).__name__}>"
    if not isinstance(found, str):
        return f"<{HOOK} failed: it returned {type(found).__name__}>"
    return found[:TRACEBACK_BYTES_MAX]
