"""Forms for changes: each form shows a dry run, and its change runs only once.

The form contains a digest of the values that its dry run shows. If it is sent with other values,
nothing is changed. Instead, it is shown again with a dry run of the new values. A form also has a
request ID. The first POST with an ID runs the act. Further POSTs with the same ID, such as from a
double click, wait for the result of the first.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

from streamqd.console.backend import Resources, record
from streamqd.console.formats import sentence
from streamqd.console.view import ActResult, FormField, Preview
from streamqd.errors import InvalidRequestError, RequestRefusedError

REQUESTS_MAX = 1_000  # requests whose results are kept
FIELDS_MAX = 200
REQUEST, TYPED, DRY = "request-id", "typed-name", "dry"
DRY_RUN_PREFIX = "dry-run-"  # starts the names of fields that a dry run, and not a person, fills in
DRY_RUN_DIGEST = f"{DRY_RUN_PREFIX}of"
REASON_FIELD = "why"  # reason for a directive, which the dry run does not depend on
NOT_AUDITED = "The audit log could not be written, so it does not contain this change."


def new_request() -> str:
    """Return a new request ID for a form."""
    return secrets.token_urlsafe(12)


def read_form(body: bytes) -> dict[str, str]:
    """Return the fields of a form. If a name is repeated, its last value is used.

    Raises InvalidRequestError if the body is not a valid form.
    """
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="strict"
        )
    except ValueError:
        raise InvalidRequestError("the form is not valid; reload the page") from None
    # Browsers send line breaks as CR LF.
    return {name: value.replace("\r\n", "\n") for name, value in pairs}


def user_values(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values that a person entered, without the form's internal fields."""
    own = {REQUEST, TYPED, DRY}
    return {
        name: value
        for name, value in values.items()
        if name not in own and not name.startswith(DRY_RUN_PREFIX)
    }


def unchanged_values(given: Mapping[str, str], fields: Sequence[FormField]) -> dict[str, str]:
    """Return the values with which a form is sent if the person changes nothing in it."""
    return user_values(given) | {each.name: each.value.replace("\r\n", "\n") for each in fields}


def digest(values: Mapping[str, str]) -> str:
    """Return a digest of the values on which a dry run depends. It identifies the dry run."""
    stated = sorted(each for each in values.items() if each[0] != REASON_FIELD)
    return hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:32]


def run_preview(function: Callable[[], Preview]) -> Preview:
    """Return a dry run. If the act is refused, the dry run's `refusal` contains the reason."""
    try:
        return function()
    except RequestRefusedError as error:
        return Preview([], refusal=sentence(str(error)))


def check_typed(given: str, wanted: str) -> None:
    """Raise RequestRefusedError unless the person typed the name that the act requires."""
    if wanted and given.strip() != wanted:
        raise RequestRefusedError(f"nothing was changed: type {wanted} to confirm")


def write_note(resources: Resources, done: ActResult) -> ActResult:
    """Write the note about a change to each topic's audit log, and return the result to show."""
    note = done.note
    if note is None or record(resources, note.topics, note.command, note.arguments, note.counts):
        return done
    return replace(done, text=f"{done.text} {NOT_AUDITED}".strip())


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The key of a request: one form of one person. Other persons cannot get its result."""

    person: str
    request: str


class RequestResults:
    """The results of the latest requests. Use it only in the event loop."""

    def __init__(self) -> None:
        self._results: OrderedDict[RequestKey, asyncio.Future[ActResult]] = OrderedDict()

    async def run_once(self, key: RequestKey, run: Callable[[], Awaitable[ActResult]]) -> ActResult:
        """Run a change once. For a repeated request, return the result of the first one.

        Raises InvalidRequestError if the request has no ID.
        """
        if not key.request:
            raise InvalidRequestError("the form has no request ID; reload the page")
        known = self._results.get(key)
        if known is not None:
            return await asyncio.shield(known)
        task = asyncio.ensure_future(run())
        self._results[key] = task
        while len(self._results) > REQUESTS_MAX:
            self._results.popitem(last=False)
        return await asyncio.shield(task)

    def result(self, key: RequestKey) -> str:
        """Return the sentence about the result of a finished request, or '' if it is unknown."""
        known = self._results.get(key)
        if known is None or not known.done() or known.cancelled() or known.exception():
            return ""
        return known.result().text
