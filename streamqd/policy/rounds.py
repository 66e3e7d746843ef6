"""Find the message that crashed a process, by running the suspects again in few rounds.

When a process dies while several messages are running, each of these messages is a suspect, and
none is charged. The next process runs the suspects in rounds. A round starts when the previous one
is settled, and no other message runs at the same time. If the process dies again during a round of
several messages, these messages join smaller rounds, with no more than half as many messages as
were running at the crash. A message that crashes its process while it runs alone is charged.

If 128 messages were running at the first crash, a message is therefore part of 7 crashes with
others at most (128, 64, 32, 16, 8, 4, 2). It starts at most 8 times because of crashes that other
messages cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Maps the place of each suspect to the size of the largest round that it may join. A suspect with
# the size 1, which is the smallest, must run alone.
Suspects = Mapping[bytes, int]


def after_crash(suspects: Suspects, running: Sequence[bytes], most: int) -> dict[bytes, int]:
    """Return the suspects after a crash during which the messages in `running` were running.

    Keep no more than `most` suspects, and give priority to those from this crash.
    """
    largest = max(1, len(running) // 2)
    found = {place: min(largest, suspects.get(place, largest)) for place in running}
    for place, earlier in suspects.items():
        if len(found) >= most:
            break
        found.setdefault(place, earlier)
    return found


def narrows(suspects: Suspects, running: Sequence[bytes]) -> bool:
    """Return True if a crash adds no suspect and only makes the rounds of known suspects smaller.

    `running` holds the messages that were running at the crash. Such a crash counts as progress in
    the search, because a round can be halved only until it consists of one message.
    """
    return len(running) > 1 and all(place in suspects for place in running)


def next_round(largest: Sequence[int]) -> int:
    """Return how many of the next suspects run together in the next round.

    `largest` is the size of the largest round that each suspect may join, in the order in which the
    suspects run.
    """
    most = largest[0]
    for count, each in enumerate(largest):
        most = min(most, each)
        if count >= most:
            # With this suspect, the round would exceed the limit of this or an earlier suspect.
            return count
    return len(largest)
