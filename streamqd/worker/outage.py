"""What the workers of one group in this instance know together: that a dependency is down.

Each partition has a worker of its own, but they all need the same database. So the circuit is the
group's, in words of the slot of its first partition here: when it was last open, how often it has
opened, and whose turn to try it was last, which is nobody's while it is closed. Every worker of the
group may write them, without a lock: the loser of a race costs one message more that is tried. A
worker that ends leaves nothing behind that another would have to wait for, because turns pass by
time alone.
"""

from __future__ import annotations

from streamqd.idle_reason import CIRCUIT, OUTAGE_NS, OUTAGE_OPENINGS, OUTAGE_TURN, PROBE, IdleReason
from streamqd.scoreboard import WORD_RUN_SEQ, WorkerSlot, now_ns

TURN_SECONDS = 0.05  # between two turns, if there is time enough for all of them


class Outage:
    """The circuit of a group, as the worker of one slot sees it. Times are `now_ns` in seconds."""

    def __init__(self, slot: WorkerSlot) -> None:
        """Find the other workers of the group; those that come later are found when they come."""
        self._slot = slot
        self._known = 0
        self._family: list[WorkerSlot] = []
        self._find()
        self._words = self._family[0].words  # for good: no slot is ever named again

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open. This is the one word that is read when all is well."""
        return self._words[OUTAGE_TURN] != 0

    @property
    def mine(self) -> bool:
        """Whether the last turn was this worker's."""
        return self._words[OUTAGE_TURN] == self._slot.index + 1

    @property
    def opened(self) -> float:
        """When the circuit was last known to be open, 0 for never."""
        return self._words[OUTAGE_NS] / 1e9

    @property
    def openings(self) -> int:
        """How often the circuit has opened: a probe tells nothing of an outage after its own."""
        return self._words[OUTAGE_OPENINGS]

    def failures(self, now: float, window: float) -> int:
        """How many failures of the other workers count: within the window, since it was open.

        Of each worker only the oldest failure is known: when that is too old, none of them counts.
        """
        since = max(now - window, self.opened)
        told = (IdleReason(each.words).kept(CIRCUIT) for each in self._others())
        return sum(failures for failures, oldest in told if oldest / 1e9 > since)

    def successes(self) -> int:
        """How many messages the other workers have settled well, which only grows."""
        return sum(each.counter("acked") for each in self._others())

    def failed(self) -> bool:
        """Open the circuit, or keep it open from now. Returns whether it was closed."""
        self._slot.words[PROBE] = 0
        self._words[OUTAGE_NS] = now_ns()
        if self.is_open:
            return False
        self._words[OUTAGE_OPENINGS] += 1
        self._words[OUTAGE_TURN] = self._slot.index + 1
        return True

    def later(self, probe_every: float) -> float:
        """How much longer than `probe_every` this worker waits: the next in the line tries first.

        So a message that fails for reasons of its own does not keep the others from trying theirs.
        """
        self._find()
        indexes = [each.index for each in self._family]
        last, own = self._words[OUTAGE_TURN] - 1, indexes.index(self._slot.index)
        place = (own - indexes.index(last) - 1) % len(indexes) if last in indexes else own
        return place * min(TURN_SECONDS, probe_every / 2 / len(indexes))

    def probe(self, *, again: bool) -> None:
        """Take the turn: the next run of this worker is the probe.

        `again`: the one before told nothing. The turn lasts no longer for it.
        """
        self._slot.words[PROBE] = self._slot.run_seq + 1
        if not again:
            self._words[OUTAGE_NS] = now_ns()
            self._words[OUTAGE_TURN] = self._slot.index + 1

    @property
    def proved(self) -> bool:
        """Whether a worker runs on behind its probe, which only a success lets it do.

        That worker looks at its successes between two reads, and the others need not wait for it.
        """
        last = self._words[OUTAGE_TURN] - 1
        if last < 0 or last == self._slot.index:
            return False
        words = self._slot.board.slot(last).words
        return 0 < words[PROBE] < words[WORD_RUN_SEQ]

    def close(self) -> bool:
        """Close the circuit, for the whole group. Returns whether it was open."""
        self._slot.words[PROBE] = 0
        was_open, self._words[OUTAGE_TURN] = self.is_open, 0
        return was_open

    def _others(self) -> list[WorkerSlot]:
        self._find()
        return [each for each in self._family if each is not self._slot]

    def _find(self) -> None:
        """Look who is of the group, if a slot was named since."""
        board, unit = self._slot.board, self._slot.unit
        if board.used == self._known:
            return
        self._known = board.used
        named = ((each, each.unit) for each in board.slots())
        self._family = [
            each
            for each, other in named
            if unit and other and (other.topic, other.group) == (unit.topic, unit.group)
        ]
