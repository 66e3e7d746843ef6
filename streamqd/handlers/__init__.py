"""Handlers: how user code declares them, how they are found, and how a run's end becomes a value.

User code is imported in children only: in the workers, and in a probe that tells the supervisor
what the modules declare and whether they import at all.

`declaration` is the decorator, `signatures` reads what a handler takes, `payloads` makes that of
the bytes, `loading` finds it by name, `probing` does so in a child. `verdicts` are what a handler
may say of a message, `outcomes` turns what it said into a value, and `redaction` takes out of its
texts what a handler's module does not want kept.
"""

from __future__ import annotations

from streamqd.handlers.declaration import (
    Context,
    declared,
    handler,
    plain_options,
    plain_schedule,
    schedule,
    scheduled,
)
from streamqd.handlers.loading import Loaded, import_paths, load, place_of, prepared
from streamqd.handlers.outcomes import (
    MESSAGE_CHARS_MAX,
    TRACEBACK_BYTES_MAX,
    Description,
    brief_of,
    failure_of,
    outcome_of,
    text_of,
)
from streamqd.handlers.probing import Probe, examine, misfits, probe, too_many_threads
from streamqd.handlers.redaction import TOO_SLOW, passed, redacted
from streamqd.handlers.signatures import Signature, is_async
from streamqd.handlers.verdicts import (
    AFTER_MAX,
    Dead,
    Failures,
    Release,
    Result,
    Retry,
    SoftTimeout,
    Undecodable,
    error_of,
)

__all__ = [
    "AFTER_MAX",
    "MESSAGE_CHARS_MAX",
    "TOO_SLOW",
    "TRACEBACK_BYTES_MAX",
    "Context",
    "Dead",
    "Description",
    "Failures",
    "Loaded",
    "Probe",
    "Release",
    "Result",
    "Retry",
    "Signature",
    "SoftTimeout",
    "Undecodable",
    "brief_of",
    "declared",
    "error_of",
    "examine",
    "failure_of",
    "handler",
    "import_paths",
    "is_async",
    "load",
    "misfits",
    "outcome_of",
    "passed",
    "place_of",
    "plain_options",
    "plain_schedule",
    "prepared",
    "probe",
    "redacted",
    "schedule",
    "scheduled",
    "text_of",
    "too_many_threads",
]
