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
    Variant("with a foreign client", _scope(expiries=0, FOREIGN=1)),
    _rounds("a killed process", KILLS=1),
    _rounds("eight lanes, poison and a kill", N=8, LANES=8, STARTS=4, POISONS=1, KILLS=1),
    _rounds("two poison messages", N=6, POISONS=2),
    _rounds("messages of one key", KEYED=1, POISONS=1, KILLERS=1),
    _rounds("batches", N=6, BATCH=1, POISONS=1, KILLS=1),
    _rounds("two partitions, a message kills hosts", N=3, PARTITIONS=2, KILLERS=1),
)

# Run by `make verify NAME=model-full` beside the small ones: minutes.
LARGE = (
    Variant("with a clean release", _scope(expiries=2, releases=1)),
    Variant("three acquisitions", _scope(acquisitions=3, expiries=2)),
    Variant("three messages", _scope(N=3)),
    Variant("with a reload", _scope(RELOADS=1)),
    Variant("with a foreign client", _scope(expiries=2, FOREIGN=1)),
    Variant("two faults", _scope(faults=2, expiries=1)),
    _rounds("every fault", N=3, POISONS=1, KILLERS=1, KILLS=1, LOSSES=1),
    _rounds("two partitions, lost hosts", N=2, PARTITIONS=2, POISONS=1, LOSSES=2),
    _rounds("two partitions, both kinds", N=2, PARTITIONS=2, POISONS=1, KILLERS=1),
)

MUTATIONS = (
    Variant(
        "a fetch without the fence",
        _scope() | {"NO_FENCE": None},
        "2",
        "WATCH of the fence around the read",
    ),
    Variant(
        "no reconcile after an unknown read",
        _scope() | {"NO_RECONCILE": None},
        "7",
        "every new connection lists its pending entries first",
    ),
    Variant(
        "no session, reconcile only",
        _scope() | {"NO_SESSION": None},
        "7",
        "message_recover writes the fence before it lists (T1)",
    ),
    Variant(
        "acquire without comparing the epoch",
        _scope(expiries=2) | {"NO_EPOCH": None},
        "3 or 7",
        "lease_acquire answers MOVED (T2)",
    ),
    Variant(
        "the scoreboard knows the running entry only",
        _scope() | {"RUNNING_ONLY": None},
        "4",
        "one state byte per entry in the slot (T3)",
    ),
    Variant(
        "the charge as a call of its own",
        _scope(faults=2, acquisitions=1, expiries=0) | {"SEPARATE_CHARGE": None},
        "5",
        "lease_refence charges in the same step (T4)",
    ),
    Variant(
        "the same token for the next child",
        _scope(faults=2, acquisitions=1, expiries=0) | {"SAME_TOKEN": None},
        "5",
        "a new token for every incarnation",
    ),
    Variant(
        "the housekeeper reclaims",
        _scope(faults=0, expiries=0) | {"FOREIGN": 1, "HOUSEKEEPER_RECLAIMS": None},
        "7",
        "the owner's worker reclaims (T5)",
    ),
    Variant(
        "a reclaim without the session",
        _scope(expiries=0) | {"FOREIGN": 1, "NO_RECLAIM_SESSION": None},
        "7",
        "message_reclaim answers SESSION",
    ),
    Variant(
        "a token used again after its release",
        _scope(expiries=0, releases=1) | {"TOKEN_REUSED": None},
        "4",
        "a token is dead once its release was sent (T13)",
    ),
    Variant(
        "a hand-over before the old child is quiet",
        _scope(faults=0, expiries=0) | {"RELOADS": 1, "REFENCE_EARLY": None},
        "4",
        "reload and recycle wait for the end of the run",
    ),
    Variant(
        "a mark that a refence keeps",
        _scope(acquisitions=3, expiries=2) | {"MARK_KEPT": None},
        "5",
        "lease_refence clears the mark (T15)",
    ),
    Variant(
        "XACK before an insertion that is refused",
        _scope(faults=0) | {"ACK_FIRST": None},
        "1",
        "insertion first, removal last",
    ),
    Variant(
        "no look whether the entry is still pending",
        _scope() | {"NO_GATE": None},
        "1",
        "settle_retry and settle_dead answer GONE",
    ),
    _rounds(
        "a crash of several charges the oldest",
        "1",
        "only a message that runs alone is charged",
        POISONS=1,
        CHARGES_THE_OLDEST=None,
    ),
    _rounds(
        "rounds of the same size",
        "2",
        "a crash halves the largest round of its members",
        POISONS=1,
        NOT_HALVED=None,
    ),
    _rounds(
        "a crash forgets the other suspects",
        "2",
        "suspects stay until they have run",
        N=6,
        POISONS=2,
        OTHERS_FORGOTTEN=None,
    ),
    _rounds(
        "new messages next to a round",
        "2",
        "a round runs alone",
        N=6,
        POISONS=1,
        KILLS=1,
        NEW_BESIDE=None,
    ),
    _rounds(
        "a mark with the first message of a round",
        "3",
        "the mark names all members",
        KILLERS=1,
        MARKS_THE_FIRST=None,
    ),
    _rounds(
        "a mark after the start",
        "3",
        "the mark is written before a round starts",
        KILLERS=1,
        MARK_LATE=None,
    ),
    _rounds(
        "a lost mark charges",
        "1",
        "a lost mark accuses, and charges no message",
        N=2,
        PARTITIONS=2,
        KILLERS=1,
        CHARGES_THE_FIRST_MARK=None,
    ),
    _rounds(
        "an accused message without an exclusive turn",
        "1",
        "no other inherited message of the host runs at the same time",
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
    _of_schedule("a schedule whose missed ticks are left out", _schedule(MISSED=1)),
    _of_schedule("a schedule that is edited twice", _schedule(edits=2, pauses=0)),
)

SCHEDULE_MUTATIONS = (
    _of_schedule(
        "a tick that compares neither its due time nor the last one",
        _schedule() | {"NO_DUE": None, "NO_SENT": None},
        "1",
        "schedule_fire answers STALE",
    ),
    _of_schedule(
        "a tick that does not compare the last one",
        _schedule() | {"NO_SENT": None},
        "1",
        "schedule_fire answers SENT",
    ),
    _of_schedule(
        "a tick of another specification",
        _schedule() | {"NO_HASH": None},
        "4",
        "schedule_fire answers CHANGED",
    ),
    _of_schedule(
        "a tick after the clock was set back",
        _schedule() | {"NO_CLOCK": None},
        "2",
        "schedule_fire answers EARLY",
    ),
    _of_schedule(
        "a paused schedule that stays due",
        _schedule() | {"PAUSE_LEAVES_DUE": None},
        "3",
        "schedule_hold takes the due time away",
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
        "rows that were read before the fence",
        "1",
        "the relay fences, then reads the rows again",
        NO_REREAD=None,
    ),
    _outbox(
        "a publish that does not compare the epoch",
        "1",
        "outbox_publish answers FENCED",
        NO_EPOCH=None,
    ),
    _outbox(
        "the same epoch after a lost reply",
        "1",
        "a relay that lost a reply takes its outbox again",
        SAME_EPOCH=None,
    ),
    _outbox(
        "the next batch before the delete of the last one",
        "1",
        "a record is replaced only after its rows are deleted",
        DELETE_LATER=None,
    ),
    _outbox(
        "a fence of the partitions that rows are for",
        "1",
        "a fence covers every partition of the topic",
        GROWTH=1,
        FENCE_USED=None,
    ),
)
