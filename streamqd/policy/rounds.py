"""Rounds: run the suspects of a crash again until one is found, with few runs.

When a process dies while several messages run, each message is a suspect, and none is charged. The
next process runs the suspects in rounds. A round starts when the last one is settled, and no other
message runs at the same time. If a round of several dies too, its members join smaller rounds: at
most half as many as ran at the crash. A message that crashes its process while it runs alone is
charged.

A message of a crash of 128 is therefore in 7 crashes at most (128, 64, 32, 16, 8, 4, 2), and
starts at most 8 times for the crashes of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By place, the largest round that the suspect may join, 1 at least. 1 means alone.
Suspects = Mapping[bytes, int]


def after_crash(suspects: Suspects, running: Sequence[bytes], most: int) -> dict[bytes, int]:
    """Return the suspects after a crash while the messages in `running` ran.

    At most `most` are kept: those of this crash first.
    """
    largest = max(1, len(running) // 2)
    found = {place: min(largest, suspects.get(place, largest)) for place in running}
    for place, earlier in suspects.items():
        if len(found) >= most:
            break
        found.setdefault(place, earlier)
    return found


def narrows(suspects: Suspects, running: Sequence[bytes]) -> bool:
    """Return True if a crash while `running` ran only makes the rounds of known suspects smaller.

    Each such crash is progress, because each round can be halved only until it is 1.
    """
    return len(running) > 1 and all(place in suspects for place in running)


def next_round(largest: Sequence[int]) -> int:
    """Return the number of suspects, starting with the first, that run in the next round.

    `largest` is the largest round of each suspect, in the order in which they run.
    """
    most = largest[0]
    for count, each in enumerate(largest):
        most = min(most, each)
        if count >= most:
            # This one would make the round too large for itself or for another.
            return count
    return len(largest)
