"""Bringing dead letters back.

Within its slot a letter moves in one step. To another partition or topic it takes three, each of
which can be done again: it is marked as moving, it is written there under its own name, it is
deleted here. Whoever is interrupted in between runs the same replay again; nothing is lost, and
nothing is written twice as long as that is within `RESUME_SECONDS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from streamqd.admin.dead_choice import DeadLetterFilter, Page, pages
from streamqd.admin.dead_letters_reading import replays_of
from streamqd.admin.dead_run import DONE, LIMIT, Pass, Progress, ReplayPace, Stop, never, silent
from streamqd.admin.dead_target import (
    HOME,
    Destination,
    Route,
    Target,
    changed,
    moved,
    read_destination,
)
from streamqd.admin.pages import Entry, server_unix_ms
from streamqd.errors import RedisRefused, RedisUnavailable
from streamqd.store import dead
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.scripts import Call, Reply

Subject = TypeVar("Subject")

MAX_REPLAYS = 3
RESUME_SECONDS = 7 * 86_400.0  # how long the name of a moved letter is remembered

NO_GROUP_NAMED = "the letter names no group"
GROUP_GONE = "its group does not exist any more"
TOO_WIDE = "it has too many fields to leave its slot"
BODY_WITHHELD = "its body was not kept (dlq_body)"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did.

    `gone` letters had been replayed or purged by somebody else. `refused` maps the reason to the
    number of letters that stayed because of it. `unknown` letters were under way when the
    connection was lost: they were replayed or stay. `ended` is done, limit (so many were wanted),
    stopped or failed, then `error` says why. Only letters that had died by `began_unix_ms` were
    chosen. `first_id` and `last_id` are the first and the last replayed. `audited` is false when
    the audit trail could not be written.
    """

    topic: str
    target: str
    replayed: int
    gone: int
    refused: dict[str, int]
    unknown: int
    ended: str
    error: str
    began_unix_ms: int
    first_id: str
    last_id: str
    audited: bool


def over_replayed(most: int) -> str:
    """The reason why a letter stays that was replayed too often."""
    times = "before" if most == 1 else f"{most} times or more already"
    return f"it was replayed {times}, and died again"


def replay(
    link: Connection,
    keys: Keys,
    topic: str,
    choice: DeadLetterFilter,
    *,
    target: Target = HOME,
    rate: float | None = None,
    limit: int | None = None,
    max_replays: int = MAX_REPLAYS,
    stop: Stop = never,
    progress: Progress = silent,
) -> ReplayResult:
    """Put letters back, the oldest of each partition first.

    `rate` spaces them evenly, so many a second. At most `limit` are replayed. A letter that was
    replayed `max_replays` times already stays. `stop` is asked between two batches; `progress` is
    told how many letters each batch had. Losing Redis ends the replay; it does not raise.

    Raises TopicMissing; Refused when a letter that is named does not exist or is another group's,
    or the target does not exist; RedisUnavailable when nothing was begun.
    """
    route = Route(link, keys, topic, target)
    found = pages(link, keys, topic, choice)
    began = server_unix_ms(link)
    done = Pass(stop, progress)
    work = _Replay(link, keys, route, done, max_replays)
    for piece in done.pieces(found, ReplayPace(rate)):
        work.run(piece if limit is None else piece[: limit - done.counts["replayed"]])
        if limit is not None and done.counts["replayed"] >= limit and done.ended == DONE:
            done.ended = LIMIT
    counts = done.counts
    what = choice.stated() | {"to": str(target)}
    note = "; ".join(f"{number}: {why}" for why, number in done.refused.items())
    return ReplayResult(
        topic=topic,
        target=str(target),
        replayed=counts["replayed"],
        gone=counts["gone"],
        refused=dict(done.refused),
        unknown=done.unknown,
        ended=done.ended,
        error=done.error,
        began_unix_ms=began,
        first_id=done.first,
        last_id=done.last,
        audited=done.record(link, keys, topic, "dlq replay", what, note),
    )


def refusal(route: Route, entry: Entry, max_replays: int) -> str:
    """Why a letter stays, as far as the letter itself tells; '' when it may go."""
    to = route.of(entry)
    if to is None:
        return NO_GROUP_NAMED
    if b"payloadBytes" in entry.fields:
        return BODY_WITHHELD
    if replays_of(entry) >= max_replays:
        return over_replayed(max_replays)
    if not route.stays(entry, to) and 2 * len(moved(route.topic, entry, to)) > dead.DELIVER_MAX:
        return TOO_WIDE
    return ""


class _Going(NamedTuple):
    """A letter and where it goes."""

    entry: Entry
    to: Destination


class _Replay:
    """Replays batches of letters of one topic."""

    def __init__(
        self, link: Connection, keys: Keys, route: Route, done: Pass, max_replays: int
    ) -> None:
        self._link = link
        self._keys = keys
        self._route = route
        self._done = done
        self._max_replays = max_replays

    def run(self, piece: Page) -> None:
        """Replay the letters of one partition."""
        near: list[_Going] = []
        far: list[_Going] = []
        for entry in piece:
            why = refusal(self._route, entry, self._max_replays)
            to = self._route.of(entry)
            if why or to is None:
                self._done.refused[why] += 1
            else:
                (near if self._route.stays(entry, to) else far).append(_Going(entry, to))
        self._step_back(near)
        if self._done.ended == DONE:
            self._move(far)

    # --- within the slot ---

    def _step_back(self, letters: list[_Going]) -> None:
        topic = self._route.topic
        calls = [
            dead.replay(
                *(self._keys, topic, entry.partition, str(entry.id), to.group),
                changed(topic, entry, to),
            )
            for entry, to in letters
        ]
        for (entry, _), reply in self._ask(letters, calls, len(letters)):
            match reply.word:
                case "OK":
                    self._replayed(entry)
                case "GONE":
                    self._done.counts["gone"] += 1
                case "MOVING":
                    self._on_its_way(reply.rest[0].decode("utf-8", "replace"))
                case _:
                    self._done.refused[GROUP_GONE] += 1

    # --- out of the slot ---

    def _move(self, letters: list[_Going]) -> None:
        keys, topic = self._keys, self._route.topic
        marks = [
            dead.mark(keys, topic, entry.partition, str(entry.id), str(to)) for entry, to in letters
        ]
        going = []
        # A mark whose answer is lost moves nothing: such letters are not under way.
        for (entry, to), reply in self._ask(letters, marks, 0):
            there = self._judge(to, reply)
            if there is not None:
                going.append(_Going(entry, there))
        if self._done.ended == DONE:
            self._deliver(going)

    def _judge(self, to: Destination, reply: Reply) -> Destination | None:
        """Where a marked letter goes on to; None when it does not."""
        if reply.word == "GONE":
            self._done.counts["gone"] += 1
            return None
        marked = dead.Marked.parse(reply)
        there = read_destination(marked.target)
        if there is None or not self._route.matches(there, to):
            self._on_its_way(marked.target)
        elif marked.age > RESUME_SECONDS / 2:
            days = round(marked.age / 86_400)
            self._done.refused[
                f"its move to {there} was interrupted {days} days ago: look whether it arrived"
                " there, then purge it"
            ] += 1
        else:
            return there
        return None

    def _deliver(self, letters: list[_Going]) -> None:
        keys, topic = self._keys, self._route.topic
        calls = [
            dead.deliver(
                *(keys, *to, moved(topic, entry, to)),
                name=f"dlq:{topic}:{entry.place}",
                window=RESUME_SECONDS,
            )
            for entry, to in letters
        ]
        arrived: list[Entry] = []
        refused: list[Entry] = []
        for (entry, _), reply in self._ask(letters, calls, len(letters)):
            (refused if reply.word == "NOGROUP" else arrived).append(entry)
        self._done.refused.update({GROUP_GONE: len(refused)} if refused else {})
        unmark = [dead.mark(keys, topic, each.partition, str(each.id), "") for each in refused]
        self._ask(refused, unmark, 0)
        self._delete(arrived)

    def _delete(self, letters: list[Entry]) -> None:
        keys, topic = self._keys, self._route.topic
        calls = [dead.purge(keys, topic, each.partition, [str(each.id)]) for each in letters]
        for entry, reply in self._ask(letters, calls, len(letters)):
            if reply.rest[0]:
                self._replayed(entry)
            else:
                self._done.counts["gone"] += 1

    # --- both ---

    def _ask(
        self, about: list[Subject], calls: list[Call], under_way: int
    ) -> list[tuple[Subject, Reply]]:
        """Run a call about each; the answers with what they are about. An error ends the pass."""
        try:
            replies = self._link.run_many(calls)
        except RedisUnavailable as error:
            self._done.fail(error, under_way)
            return []
        found = []
        for each, reply in zip(about, replies, strict=True):
            if isinstance(reply, RedisRefused):
                self._done.fail(reply)
            else:
                found.append((each, reply))
        return found

    def _replayed(self, entry: Entry) -> None:
        self._done.counts["replayed"] += 1
        self._done.touched(entry)

    def _on_its_way(self, where: str) -> None:
        self._done.refused[f"it is on its way to {where}: finish that replay first"] += 1
