"""The results as lines for a terminal and as a page of the documentation."""

from __future__ import annotations

import hashlib
import re

from tests.protocol.checker import MODELS, Checked
from tests.protocol.variants import (
    LARGE,
    MUTATIONS,
    OUTBOX,
    OUTBOX_MUTATIONS,
    SCHEDULE,
    SCHEDULE_MUTATIONS,
    SMALL,
)

_HEAD = """\
<!-- Written by `make verify NAME=model-full`: do not edit. -->

# The protocol model

Tests run a protocol many times, but they cannot try every order of events. A model checker can:
[Spin](https://spinroot.com) visits every reachable state of a model and checks its invariants in
each one. Four models describe the protocols of a partition, of recovery in rounds, of a schedule
and of an outbox. Because the numbers of messages and faults are small, the results are evidence and
not a proof.

`make verify NAME=model` checks the models in small scopes, and all mutations of them. CI runs it
for every change. The figures on this page belong to the models with the digest {digest}.

## Partitions

`tests/protocol/partition.pml` models one partition and one group. It has two instances, each with a
supervisor and a worker, and also the server, the housekeeper, and another client. Every script is
one atomic step. Any process may pause for any time, and the lease may expire at any moment. The
number of faults is limited by a budget. A fault is a worker that dies, a host that is lost, a call
whose reply is lost, or a call that is **executed late**, which means after its sender gave up, and
after newer calls. Late calls cause the worst bugs, so a model without them would miss these bugs.

The invariants are:

1. Each message is in exactly one place: unread, pending, waiting retry, retry unread, retry
   pending, dead, acknowledged, or pending at another client.
2. A call with a superseded token changes nothing.
3. The owner starts only messages that are pending.
4. The handler of a message starts at most once, and once more for each failure, for each crash that
   it causes, and for each owner that is lost after the start.
5. No message is charged with more crashes than it caused. The mark of a replaced owner is an
   exception, because it is charged once.
6. When the owner starts messages for the first time, it follows the order of the stream.
7. In every final state with an owner of the partition, all messages are settled.

The model leaves out a second group, trimming, and time itself, which means the deadline until which
a worker trusts its lease, and the second look before a takeover. It also leaves out a mark without
suspects, retries that wait in place, adoption, a server that restarts without its last writes, and
several late calls at the same time. The contract tests and the fault battery cover these. One
detail differs from the code: in this model, a mark charges its message after the first lost owner,
whereas the code isolates the message first. [The model of rounds](#recovery-in-rounds) covers this
isolation.

## Recovery in rounds

`tests/protocol/rounds.pml` models
[recovery in rounds](../explanation/decisions/0029-run-suspects-in-rounds.md), which finds the
message that crashed a process while many messages were running. It has one or two partitions of a
host, and several concurrent runs in each worker. Any message may be a *poison message*, which
crashes its process whenever it runs, or a *killer*, which takes down its host. Processes and hosts
may also be lost for other reasons, again within a budget.

The invariants are:

1. A healthy message is charged only for an external fault while it ran alone.
2. A message starts at most 1 + log2(lanes) times, where the lanes are the messages that a worker
   may run at the same time, and once more for each crash that it causes. Each lost host allows the
   same number of starts again.
3. Without external kills, a message takes down at most three hosts.
4. A message starts only after earlier messages of its key.
5. In every final state, all messages are acknowledged or dead-lettered. Invariant 2 limits the
   number of starts, so every run reaches such a state.

## Schedules

`tests/protocol/schedule.pml` models one [schedule](../how-to/schedule-messages.md). Two
housekeepers send its ticks while the schedule is edited, an operator pauses and resumes it, and the
server's clock is set back. A housekeeper may die between two steps, and a call may be executed
late.

The invariants are:

1. No tick is sent twice.
2. Nothing is sent before it is due.
3. Nothing is sent while the schedule is paused.
4. Once a specification is replaced, it sends nothing.
5. In every final state, each past tick was either sent, or skipped because of `misfire` or an edit.

The model leaves out schedules that move to another partition, are removed, lose the instance that
declares them, or overlap with their previous run. The kill points of
`tests/acceptance/test_schedules.py` and the contract tests cover these cases.

## Outboxes

`tests/protocol/outbox.pml` models one
[outbox](../explanation/decisions/0035-deduplicate-outbox-rows-in-the-partition.md). It has two
relays, a table of rows with two keys, and a topic that may grow. A relay may die or pause at any
step, even for longer than its lease. When a relay publishes or deletes rows, the reply may be lost,
or the call may be executed late.

The invariants are:

1. No row is in the topic twice.
2. The rows of a key are in the order in which they were committed.
3. No row is deleted before it is in the topic.
4. In every final state, each committed row is in the topic and the table is empty.

The model leaves out rows of delayed sends, dead-lettered rows, rejected writes, and a server that
restarts without its last writes. The contract tests and the acceptance tests cover the first three.

## Verified variants

In the following scopes, Spin visits all states, and all invariants hold. `make verify NAME=model`
runs these variants:

| Variant | Scope | States | Transitions |
| --- | --- | --- | --- |
"""

_FULL = """
`make verify NAME=model-full` also runs larger scopes, which take several minutes:

| Variant | Scope | States | Transitions |
| --- | --- | --- | --- |
"""

_MUTATIONS = """
## Mutations

An invariant that holds proves little if the model could not violate it. Each of the following
variants therefore removes one rule of the protocol, and Spin must find an invariant that is then
violated. This also shows why each rule is necessary. The trace of a variant is its shortest
counterexample. In the traces, A and B are the two instances, housekeepers or relays. A number in
parentheses is a token, and a number without a noun is a message or a row.

"""

_FOUND = """
## Bugs found

The models found two bugs:

- **A tick was sent twice.** This happened when a schedule was edited while a tick was due. The edit
  read the clock and computed the next due time. Before it wrote this time, a housekeeper sent the
  tick, so the edit made the same tick due again. `schedule_fire` now compares the last tick.
- **An entry was handled half a minute late.** The cause was a reclaim that was executed late: in
  between, the worker had reconnected and listed its pending entries. The reclaim then moved an
  entry of another client into the worker's pending list, and the worker did not notice it until it
  compared its counts. `message_reclaim` compared only the token, which was still valid. It now also
  compares the session, as the read and the mark do.
"""


_ONE = {
    "messages": "message",
    "faults": "fault",
    "acquisitions": "acquisition",
    "expiries": "expiry",
    "releases": "release",
    "reloads": "reload",
    "reads by another client": "read by another client",
    "edits": "edit",
    "pauses": "pause",
    "steps back of the clock": "step back of the clock",
    "poison messages": "poison message",
    "killers": "killer",
    "kills": "kill",
    "lost hosts": "lost host",
}  # words of a scope -> their singular


def line(result: Checked) -> str:
    """Return one line for a terminal."""
    variant = result.variant
    ending = f"invariant {result.violated} breaks" if result.violated else "all hold"
    verdict = "" if result.expected else "   <-- wrong"
    kind = "without the rule: " if variant.breaks else ""
    return f"{kind}{variant.title} ({scope(result)}): {ending}, {result.states:,} states{verdict}"


def scope(result: Checked) -> str:
    """Return the bounds of a run."""
    defines = {"N": 0 if result.variant.model == "schedule" else 2, **result.variant.defines}
    if defines.get("PARTITIONS") == 2:
        defines["N"] = 2 * (defines["N"] or 0)
    words = {
        "N": "messages",
        "FAULTS": "faults",
        "ACQUISITIONS": "acquisitions",
        "EXPIRIES": "expiries",
        "GROWTH": "growth",
        "RELEASES": "releases",
        "RELOADS": "reloads",
        "FOREIGN": "reads by another client",
        "TICKS": "ticks",
        "EDITS": "edits",
        "PAUSES": "pauses",
        "BACKS": "steps back of the clock",
        "PARTITIONS": "partitions",
        "LANES": "lanes",
        "POISONS": "poison messages",
        "KILLERS": "killers",
        "KILLS": "kills",
        "LOSSES": "lost hosts",
    }
    counts = ((defines[name], word) for name, word in words.items() if defines.get(name))
    return ", ".join(f"{n} {_ONE.get(word, word) if n == 1 else word}" for n, word in counts)


def digest() -> str:
    """Return a hash of the models and the checked variants, without comments and titles."""
    texts = "".join(each.read_text() for each in MODELS.values())
    model = re.sub(r"/\*.*?\*/", "", texts, flags=re.DOTALL)
    checked = (
        *SMALL,
        *LARGE,
        *MUTATIONS,
        *SCHEDULE,
        *SCHEDULE_MUTATIONS,
        *OUTBOX,
        *OUTBOX_MUTATIONS,
    )
    scopes = [(each.model, each.defines, each.breaks) for each in checked]
    return hashlib.sha256(f"{model}{scopes}".encode()).hexdigest()[:16]


def _mutation(result: Checked) -> str:
    """Return a list item: the variant, the rule that it removes, and the counterexample."""
    title = result.variant.title
    if "_" not in title.partition(" ")[0]:  # a name of code keeps its case
        title = title[0].upper() + title[1:]
    return (
        f"- **{title}.** The removed rule is that {result.variant.rule}. Without it, invariant"
        f" {result.violated} is violated.\n  Trace: {' → '.join(result.trace)}\n"
    )


def render(results: list[Checked]) -> str:
    """Return the page."""
    holding = [
        (
            each.variant in LARGE,
            f"| {each.variant.title} | {scope(each)} | {each.states:,} | {each.transitions:,} |\n",
        )
        for each in results
        if not each.variant.breaks
    ]
    small = "".join(row for is_large, row in holding if not is_large)
    large = "".join(row for is_large, row in holding if is_large)
    broken = [_mutation(each) for each in results if each.variant.breaks]
    head = _HEAD.format(digest=digest()) + small + _FULL + large
    return head + _MUTATIONS + "".join(broken) + _FOUND
