"""Which nodes of Redis did not answer, and how long each is left alone."""

from __future__ import annotations

from collections.abc import Callable

SPENT_SECONDS = 3.0  # after the end of a pause; a node that is wanted is asked within a tick


class NodeBackoff:
    """A pause for each node that did not answer, the longer the more often that was so.

    `first` and `longest` are seconds; `jitter` gives numbers of 0 to 1.
    """

    def __init__(self, first: float, longest: float, jitter: Callable[[], float]) -> None:
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._until: dict[str, float] = {}
        self._next: dict[str, float] = {}

    def begin(self, node: str, now: float) -> float:
        """The node did not answer. Returns until when it is left alone (monotonic)."""
        pause = self._next.get(node, self._first)
        self._next[node] = min(pause * 2, self._longest)
        self._until[node] = now + pause * (0.5 + self._jitter())
        return self._until[node]

    def end(self, node: str) -> None:
        """The node has answered."""
        self._until.pop(node, None)
        self._next.pop(node, None)

    def forget(self, now: float) -> None:
        """Forget nodes that nobody asks any more: the keys are with others."""
        for node in [each for each, until in self._until.items() if now > until + SPENT_SECONDS]:
            self.end(node)

    def rests(self, node: str, now: float) -> bool:
        """Whether the node is to be left alone now."""
        return self.end_of(node) > now

    def end_of(self, node: str) -> float:
        """When the pause of a node is over (monotonic); 0 when it has none."""
        return self._until.get(node, 0.0)

    def __bool__(self) -> bool:
        """Whether any node has not answered since."""
        return bool(self._until)
