"""The handler of the soak, which does what the payload says and keeps the ledger.

A payload is the message's number, a word and an argument: `17 sleep 0.01`, `18 fail 2` (which
raises at the first two attempts), `19 dead`. With each run, the ledger stores the number and the
epoch.
"""

from __future__ import annotations

import time

from streamqd import Dead, Message
from tests.support.ledger import Ledger

# The soak does not include a power cut, and waiting for the disk would only blur the end of a run.
ledger = Ledger.from_environment(durable=False)


def obey(message: Message) -> None:
    """Do what the payload says."""
    number, word, *arguments = message.text().split()
    with ledger.run(message, f"{number} {message.epoch}"):
        if word == "sleep":
            time.sleep(float(arguments[0]))
        elif word == "fail" and message.attempt <= int(arguments[0]):
            raise ValueError(f"told to fail, attempt {message.attempt}")
        elif word == "dead":
            raise Dead("told to be dead")
