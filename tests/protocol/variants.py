"""The variants to check: the protocol in several scopes, and the protocol without one rule."""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    """One run of the checker. `breaks` is '' for the protocol itself, which must hold.

    `defines` are the scope (messages, faults, acquisitions …) and the mutation's name. `model` is
    the file of the model.
    """

    title: str
    defines: dict[str, int | None]
    breaks: str = ""
    rule: str = ""  # the rule that the mutation removes, and its place in the code
    model: str = "partition"

    @property
    def flags(self) -> list[str]:
        """Return the -D options of the preprocessor."""
        return [
            f"-D{name}" if value is None else f"-D{name}={value}"
            for name, value in self.defines.items()
        ]


def _scope(
    faults: int = 1, acquisitions: int = 2, expiries: int = 1, releases: int = 0, **more: int
) -> dict[str, int | None]:
    return {
        "FAULTS": faults,
        "ACQUISITIONS": acquisitions,
        "EXPIRIES": expiries,
        "RELEASES": releases,
        **more,
    }


def _rounds(title: str, breaks: str = "", rule: str = "", **defines: int | None) -> Variant:
    return Variant(title, {"N": 4, "LANES": 4, "STARTS": 3, **defines}, breaks, rule, "rounds")


# Run by `make verify NAME=model` and in CI.
SMALL = (
    Variant("base", _scope(expiries=2)),
    Variant("with a clean release", _scope(expiries=1, releases=1)),
    Variant("two faults, one owner", _scope(faults=2, acquisitions=1)),
    Variant("with a reload", _scope(expiries=0, RELOADS=1)),
    Variant("with another client", _scope(expiries=0, FOREIGN=1)),
    _rounds("a killed process", KILLS=1),
    _rounds("eight lanes, a poison message and a kill", N=8, LANES=8, STARTS=4, POISONS=1, KILLS=1),
    _rounds("two poison messages", N=6, POISONS=2),
    _rounds("messages of one key", KEYED=1, POISONS=1, KILLERS=1),
    _rounds("batches", N=6, BATCH=1, POISONS=1, KILLS=1),
    _rounds("two partitions, a killer", N=3, PARTITIONS=2, KILLERS=1),
)

# Run by `make verify NAME=model-full`, with the small ones. This takes minutes.
LARGE = (
    Variant("with a clean release", _scope(expiries=2, releases=1)),
    Variant("three acquisitions", _scope(acquisitions=3, expiries=2)),
    Variant("three messages", _scope(N=3)),
    Variant("with a reload", _scope(RELOADS=1)),
    Variant("with another client", _scope(expiries=2, FOREIGN=1)),
    Variant("two faults", _scope(faults=2, expiries=1)),
    _rounds("every fault", N=3, POISONS=1, KILLERS=1, KILLS=1, LOSSES=1),
    _rounds("two partitions, lost hosts", N=2, PARTITIONS=2, POISONS=1, LOSSES=2),
    _rounds(
        "two partitions, a poison message and a killer", N=2, PARTITIONS=2, POISONS=1, KILLERS=1
    ),
)

MUTATIONS = (
    Variant(
        "a fetch does not watch the fence",
        _scope() | {"NO_FENCE": None},
        "2",
        "a worker reads in a transaction that fails if the fence changes",
    ),
    Variant(
        "a new connection does not list pending entries",
        _scope() | {"NO_RECONCILE": None},
        "7",
        "a worker lists its pending entries on each new connection, before it reads",
    ),
    Variant(
        "a new connection lists pending entries without a session",
        _scope() | {"NO_SESSION": None},
        "7",
        "message_recover opens a session in the fence before it lists the pending entries, so a"
        " late read on an older connection fails",
    ),
    Variant(
        "lease_acquire does not compare the epoch",
        _scope(expiries=2) | {"NO_EPOCH": None},
        "3 or 7",
        "lease_acquire returns MOVED if the epoch has changed since the caller read it, because"
        " another owner has acquired the lease in between",
    ),
    Variant(
        "the scoreboard records only the running entry",
        _scope() | {"RUNNING_ONLY": None},
        "4",
        "the scoreboard has a state for each fetched entry, so finished entries are known after a"
        " crash",
    ),
    Variant(
        "a separate call charges the crash",
        _scope(faults=2, acquisitions=1, expiries=0) | {"SEPARATE_CHARGE": None},
        "5",
        "lease_refence replaces the token and charges the crash in one step",
    ),
    Variant(
        "the next worker keeps the token",
        _scope(faults=2, acquisitions=1, expiries=0) | {"SAME_TOKEN": None},
        "3 or 5",
        "each worker process gets a new token, so a late call of its predecessor is rejected",
    ),
    Variant(
        "the housekeeper reclaims entries",
        _scope(faults=0, expiries=0) | {"FOREIGN": 1, "HOUSEKEEPER_RECLAIMS": None},
        "7",
        "only the owner's worker takes over entries of other clients, so it knows of each one",
    ),
    Variant(
        "message_reclaim does not compare the session",
        _scope(expiries=0) | {"FOREIGN": 1, "NO_RECLAIM_SESSION": None},
        "7",
        "message_reclaim returns SESSION if the worker has opened a session on a newer connection",
    ),
    Variant(
        "a released token is used again",
        _scope(expiries=0, releases=1) | {"TOKEN_REUSED": None},
        "4",
        "an instance never uses a token again once it has sent a release with this token",
    ),
    Variant(
        "a reload starts a worker while the old one still runs a message",
        _scope(faults=0, expiries=0) | {"RELOADS": 1, "REFENCE_EARLY": None},
        "4",
        "a worker is replaced only when its running message has finished",
    ),
    Variant(
        "lease_refence keeps the mark",
        _scope(acquisitions=3, expiries=2) | {"MARK_KEPT": None},
        "5",
        "lease_refence clears the mark of the messages that are about to run",
    ),
    Variant(
        "XACK precedes an insertion that is rejected",
        _scope(faults=0) | {"ACK_FIRST": None},
        "1",
        "a script inserts first and removes last, so a rejected insertion changes nothing",
    ),
    Variant(
        "settling does not check that the entry is pending",
        _scope() | {"NO_GATE": None},
        "1",
        "settle_retry and settle_dead change nothing and return GONE if the entry is not pending",
    ),
    _rounds(
        "a crash with several running messages charges the oldest",
        "1",
        "a message is charged only if it ran alone",
        POISONS=1,
        CHARGES_THE_OLDEST=None,
    ),
    _rounds(
        "a crash does not shrink the next round",
        "2",
        "suspects may only join rounds of half the size after a crash",
        POISONS=1,
        NOT_HALVED=None,
    ),
    _rounds(
        "a crash clears the other suspects",
        "2",
        "a message stays a suspect until a worker has run it",
        N=6,
        POISONS=2,
        OTHERS_FORGOTTEN=None,
    ),
    _rounds(
        "new messages run alongside a round",
        "2",
        "no other message runs at the same time as a round",
        N=6,
        POISONS=1,
        KILLS=1,
        NEW_BESIDE=None,
    ),
    _rounds(
        "the mark names only the first message of a round",
        "3",
        "the mark in Redis names all messages of the round that is about to run",
        KILLERS=1,
        MARKS_THE_FIRST=None,
    ),
    _rounds(
        "the mark is written after a round starts",
        "3",
        "the mark is written before a round starts",
        KILLERS=1,
        MARK_LATE=None,
    ),
    _rounds(
        "the first lost mark charges its message",
        "1",
        "the messages of a mark are isolated but not charged when the first host is lost",
        N=2,
        PARTITIONS=2,
        KILLERS=1,
        CHARGES_THE_FIRST_MARK=None,
    ),
    _rounds(
        "an isolated message runs without an exclusive turn",
        "1",
        "no other inherited message runs on the same host while an isolated message runs",
        N=2,
        PARTITIONS=2,
        KILLERS=1,
        NO_TURNS=None,
    ),
)


def _schedule(
    ticks: int = 3, faults: int = 1, edits: int = 1, pauses: int = 1, backs: int = 1, **more: int
) -> dict[str, int | None]:
    return {
        "TICKS": ticks,
        "FAULTS": faults,
        "EDITS": edits,
        "PAUSES": pauses,
        "BACKS": backs,
        **more,
    }


def _of_schedule(
    title: str, defines: dict[str, int | None], breaks: str = "", rule: str = ""
) -> Variant:
    return Variant(title, defines, breaks, rule, "schedule")


SCHEDULE = (
    _of_schedule("a schedule", _schedule()),
    _of_schedule("a schedule that skips missed ticks", _schedule(MISSED=1)),
    _of_schedule("a schedule that is edited twice", _schedule(edits=2, pauses=0)),
)

SCHEDULE_MUTATIONS = (
    _of_schedule(
        "schedule_fire compares neither the due time nor the last tick",
        _schedule() | {"NO_DUE": None, "NO_SENT": None},
        "1",
        "schedule_fire sends only the tick that is due next, and returns STALE for any other",
    ),
    _of_schedule(
        "schedule_fire does not compare the last tick",
        _schedule() | {"NO_SENT": None},
        "1",
        "schedule_fire returns SENT if this tick, or a later one, was sent before",
    ),
    _of_schedule(
        "schedule_fire does not compare the specification",
        _schedule() | {"NO_HASH": None},
        "4",
        "schedule_fire returns CHANGED if the schedule was edited after the caller had read it",
    ),
    _of_schedule(
        "schedule_fire does not compare the clock",
        _schedule() | {"NO_CLOCK": None},
        "2",
        "schedule_fire returns EARLY if the tick is not due by the server's clock",
    ),
    _of_schedule(
        "a paused schedule stays due",
        _schedule() | {"PAUSE_LEAVES_DUE": None},
        "3",
        "schedule_hold, which pauses a schedule, removes it from the due schedules",
    ),
)


def _outbox(title: str, breaks: str = "", rule: str = "", **more: int | None) -> Variant:
    return Variant(title, {"N": 3, "FAULTS": 1, "EXPIRIES": 1, **more}, breaks, rule, "outbox")


OUTBOX = (
    _outbox("an outbox", EXPIRIES=2),
    _outbox("an outbox with two faults", FAULTS=2),
    _outbox("an outbox whose topic grows", N=4, GROWTH=1),
)

OUTBOX_MUTATIONS = (
    _outbox(
        "the relay publishes rows that it read before the fence",
        "1",
        "a relay reads the rows again after it has written its epoch to the partitions",
        NO_REREAD=None,
    ),
    _outbox(
        "outbox_publish does not compare the epoch",
        "1",
        "outbox_publish returns FENCED if a later relay has written its epoch to the partition",
        NO_EPOCH=None,
    ),
    _outbox(
        "a relay keeps its epoch after a lost reply",
        "1",
        "a relay acquires its outbox again, with a new epoch, after a lost reply",
        SAME_EPOCH=None,
    ),
    _outbox(
        "the next batch is published before the last one is deleted",
        "1",
        "the record of the published rows is replaced only after these rows are deleted",
        DELETE_LATER=None,
    ),
    _outbox(
        "a fence covers only partitions with rows",
        "1",
        "a relay writes its epoch to every partition of the topic, even to those without rows",
        GROWTH=1,
        FENCE_USED=None,
    ),
)
