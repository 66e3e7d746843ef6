"""Request the stack of a worker from the instance that owns its assignment, and read it."""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.admin import directives, published
from streamqd.admin.directives import WrittenDirective
from streamqd.admin.published import Fleet, FleetState
from streamqd.admin.reading import ViewReader, lease_views
from streamqd.errors import RequestRefusedError
from streamqd.model import Assignment
from streamqd.store import stacks
from streamqd.store.directives import Directive, Scope
from streamqd.store.stacks import PublishedStack

ANSWER_SECONDS = 20.0  # seconds within which the owner answers, which are several of its heartbeats
REQUESTS_MAX = 16  # maximum number of unanswered stack requests among a fleet's directives


@dataclass(frozen=True, slots=True)
class StackView:
    """The last published stack of an assignment, and the last request for one.

    While the owner still has time to answer the request (ANSWER_SECONDS), `awaited` is true. If it
    did not answer in time, `missed` is true instead. Both are false if there is no request, or if
    `published` is the answer to it.
    """

    request: Directive | None
    published: PublishedStack | None
    awaited: bool
    missed: bool


def request(fleet: Fleet, assignment: Assignment, *, dry_run: bool = False) -> WrittenDirective:
    """Ask the owner of an assignment to publish the stack of its worker.

    This also removes requests in the fleet that are too old to be answered. Raises
    RequestRefusedError if the assignment has no live owner, or if there are already REQUESTS_MAX
    other recent requests.
    """
    directives.check_scope(fleet, Scope(*assignment))
    state = published.fleet_state(fleet)
    [held] = lease_views(ViewReader(fleet.store), [assignment])
    if not held.token:
        raise RequestRefusedError(
            f"no instance owns {assignment}, so it has no worker; run `streamqd why {assignment}`"
        )
    directives.find_live_member(state, held.owner)
    others = {each: given for each, given in state.control.stacks.items() if each != assignment}
    old = [each for each, given in others.items() if not _is_recent(given, state.now_unix_ms)]
    if len(others) - len(old) >= REQUESTS_MAX:
        raise RequestRefusedError(
            f"{REQUESTS_MAX} stacks were requested in the last {ANSWER_SECONDS:.0f} s; wait, and"
            " request this one again"
        )
    name, notes = f"stack:{assignment}", [f"{held.owner} owns it"]
    if dry_run:
        return WrittenDirective(name, None, True, True, notes)
    done = directives.write(fleet, name, remove=[f"stack:{each}" for each in old])
    return WrittenDirective(name, done.at_unix_ms, True, False, notes)


def read(
    reader: ViewReader, state: FleetState, assignment: Assignment, now_unix_ms: int
) -> StackView:
    """Return the stack of an assignment. An invalid one is recorded and treated as missing."""
    key = reader.keys.stack(*assignment)
    [raw] = reader.ask([("GET", key)])
    found, given = reader.read(stacks.parse, raw, key), state.control.stacks.get(assignment)
    if given is not None and now_unix_ms - given.at_unix_ms > stacks.KEPT_SECONDS * 1000:
        given = None  # an answer to it would have expired by now
    is_open = given is not None and (found is None or found.requested_unix_ms < given.at_unix_ms)
    awaited = is_open and given is not None and _is_recent(given, now_unix_ms)
    return StackView(given, found, awaited, is_open and not awaited)


def _is_recent(given: Directive, now_unix_ms: int) -> bool:
    return now_unix_ms - given.at_unix_ms < ANSWER_SECONDS * 1000
