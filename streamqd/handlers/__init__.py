"""Handlers: declare, find and load them, and turn the result of a run into a value.

User code is imported only in child processes: in the workers, and in a probe that reports the
declarations and import errors of the modules to the supervisor.

`declaration` contains the decorators, `signatures` reads the parameters of a handler, and
`payloads` decodes payloads for them. `loading` finds a handler by its name, and `probing` does so
in a child process. `verdicts` contains the exceptions and results with which a handler decides on a
message, `outcomes` turns them into values, and `redaction` runs the hook that removes private text.
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
from streamqd.handlers.loading import Loaded, error_location, import_paths, load, prepare
from streamqd.handlers.outcomes import (
    MESSAGE_CHARS_MAX,
    TRACEBACK_BYTES_MAX,
    Description,
    describe_failure,
    error_text,
    to_brief_outcome,
    to_outcome,
)
from streamqd.handlers.probing import Probe, examine, find_mismatches, probe, too_many_threads
from streamqd.handlers.redaction import TOO_SLOW, redact_failure, redact_text
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
    run_error,
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
    "declared",
    "describe_failure",
    "error_location",
    "error_text",
    "examine",
    "find_mismatches",
    "handler",
    "import_paths",
    "is_async",
    "load",
    "plain_options",
    "plain_schedule",
    "prepare",
    "probe",
    "redact_failure",
    "redact_text",
    "run_error",
    "schedule",
    "scheduled",
    "to_brief_outcome",
    "to_outcome",
    "too_many_threads",
]
