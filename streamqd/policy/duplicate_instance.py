"""Another run under our id: whether it lives, or died a moment before the clock was set back.

How long ago a run has beaten is known by the server's clock. When that is set back by an hour, one
that is dead seems to have beaten just now, for an hour. But who lives beats: one that has not, for
longer than a ttl by our own clock, is dead whatever the server says.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamqd.policy.rebalance import SILENT_BEATS


@dataclass
class DuplicateInstance:
    """What the server says of it at our beats. All in seconds, `now` of any monotonic clock."""

    ttl: float
    interval: float  # between two beats of ours, about
    _beat: int | None = None  # its last one, unix ms; None = there is no other run
    _first: float = 0.0  # when we heard of it
    _heard: float = 0.0  # and when we did last
    _changed: float = 0.0  # when it was seen to have beaten
    _since: float = 0.0  # since when we have watched it not beating

    def heard(self, beat_unix_ms: int, now: float) -> bool:
        """Note when it has beaten; return whether it is certain to be dead."""
        if self._beat is None:
            self._first = self._changed = self._since = now
        elif beat_unix_ms != self._beat:
            self._changed = self._since = now
        elif now - self._heard > SILENT_BEATS * self.interval:
            self._since = now  # whoever has not asked for a while has not seen who beats
        self._beat, self._heard = beat_unix_ms, now
        return now - self._since > self.ttl

    def gone(self) -> None:
        """Note that there is none."""
        self._beat = None

    @property
    def stays(self) -> bool:
        """Whether it lives, and has had the time to end if that is what it was about to do."""
        return self._beat is not None and self._changed - self._first > self.ttl + self.interval
