"""How a producer chooses among the partitions of a topic, when the message does not name one.

A partitioner is chosen by name, or is a function of the key (None without one) and the number of
partitions. What it may do is bounded by what others rely on: with a `dedup_id` a repetition must
meet the first send, so nothing takes turns then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from streamqd.policy.partitioning import crc32_partition, jump_partition

Named = Literal["hash", "round-robin", "sticky", "consistent"]
Partitioner = Named | Callable[[bytes | None, int], int]


class Chooser:
    """Chooses partitions of one topic. Keeps whose turn it is."""

    def __init__(self, partitioner: Partitioner) -> None:
        self._function = partitioner if callable(partitioner) else None
        self._name = "" if callable(partitioner) else partitioner
        self._by_key = jump_partition if partitioner == "consistent" else crc32_partition
        self._turn: int | None = None

    def takes_turns(self, key: bytes | None, dedup_id: str | None) -> bool:
        """Whether any partition is as good as another for such a message."""
        if dedup_id is not None or self._function is not None:
            return False
        return key is None or self._name == "round-robin"

    def choose(self, key: bytes | None, dedup_id: str | None, count: int) -> int:
        """Choose. Raises ValueError for what a function chose that is no partition."""
        if self.takes_turns(key, dedup_id):
            [turn] = self.turns(1, count)
            return turn
        if dedup_id is not None and (key is None or self._name == "round-robin"):
            return self._by_key(dedup_id.encode(), count)
        if self._function is None:
            assert key is not None
            return self._by_key(key, count)
        chosen = self._function(key, count)
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < count:
            raise ValueError(
                f"the partitioner chose {chosen!r}, which is none of the {count} partitions"
            )
        return chosen

    def turns(self, number: int, count: int) -> list[int]:
        """Choose for so many messages that take turns."""
        turn = self._turn
        if turn is None:
            # Many short-lived producers must not all begin at 0.
            turn = random.randrange(count)
        if self._name == "sticky":
            self._turn = turn
            return [turn % count] * number
        self._turn = turn + number
        return [each % count for each in range(turn, turn + number)]

    def begin_batch(self) -> None:
        """What comes next is written in another transaction than what came before."""
        if self._name == "sticky" and self._turn is not None:
            self._turn += 1


class Partitioners:
    """The partitioner of each topic. Raises ValueError for a name that is none."""

    def __init__(self, chosen: Partitioner | Mapping[str, Partitioner]) -> None:
        self._of_topic: Mapping[str, Partitioner] = chosen if isinstance(chosen, Mapping) else {}
        self._of_others: Partitioner = "hash" if isinstance(chosen, Mapping) else chosen
        self._choosers: dict[str, Chooser] = {}
        for each in (*self._of_topic.values(), self._of_others):
            if not callable(each) and each not in get_args(Named):
                raise ValueError(
                    f"{each!r} is not a partitioner: choose one of {', '.join(get_args(Named))},"
                    " or give a function"
                )

    def of(self, topic: str) -> Chooser:
        """The chooser of a topic."""
        found = self._choosers.get(topic)
        if found is None:
            chosen = self._of_topic.get(topic, self._of_others)
            found = self._choosers[topic] = Chooser(chosen)
        return found

    def forget_turns(self) -> None:
        """After a fork: else every child would begin at the same partition."""
        self._choosers.clear()
