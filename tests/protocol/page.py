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

streamqd's processes coordinate through Redis, and must stay correct even if a process dies or a
packet arrives late at the worst possible moment. Tests run this protocol many times, but cannot try
every order of events. A model checker can: [Spin](https://spinroot.com) takes a *model*, a
simplified description of the protocol, visits every state that the model can reach, and checks in
each one that certain statements hold, the *invariants*.

There are four models, for the ownership of a partition, for recovery in rounds, for schedules and
for outboxes. Each model is limited to a few messages and faults, because the number of states would
otherwise be too large. The results are therefore strong evidence, but not a proof.

`make verify NAME=model` checks the models in small scopes. It also checks *mutations*, models in
which one rule of the protocol is removed, and for which Spin must find an error. CI runs this
command for every change. The figures on this page belong to the models with the digest {digest}.

## Partitions

`tests/protocol/partition.pml` models one partition and one group: how an instance acquires the
lease, how its worker fetches, handles and settles messages, and how another instance takes over.
The model has two instances, each with a supervisor and a worker, and also the server, the
housekeeper, and another client that reads from the group. Every script is one atomic step. Any
process may pause for any time, and the lease may expire at any moment.

A limited number of faults may occur. A fault is a worker that dies, a host that is lost, a call
whose reply is lost, or a call that is **executed late**: its sender has given up waiting and has
sent newer calls before the server executes it. Late calls are part of the model because they cause
the worst bugs.

The invariants are:

1. Each message is in exactly one place: unread, pending, waiting retry, retry unread, retry
   pending, dead, acknowledged, or pending at another client.
2. A call with a superseded token changes nothing. A token is superseded when the server has
   accepted a newer one, for another owner or another worker process.
3. The owner starts only messages that are pending.
4. The handler of a message starts at most once, and once more for each failure, for each crash that
   it causes, and for each owner that is lost after the start.
5. No message is charged with more crashes than it caused. There is one exception: the *mark*, which
   an owner writes to Redis before it runs messages of a lost owner, names the messages that are
   about to run. When this owner is lost too, the message of its mark is charged once.
6. When the owner starts messages for the first time, it follows the order of the stream.
7. In every final state with an owner of the partition, all messages are settled.

To keep the number of states small, the model leaves out parts of the protocol. It has no second
group and no trimming. It has no time either, so neither the deadline until which a worker trusts
its lease, nor the rule that an instance must observe a silence twice before it takes over. It also
leaves out a mark without suspects, retries that wait in the worker, taking over the entries of
other clients by command, a server that restarts without its last writes, and several late calls at
the same time. The contract tests and the [fault battery](fault-battery.md) cover these cases.

One detail differs from the code. In this model, a mark charges its message when the first owner is
lost, whereas the code first isolates the message, so that it runs alone before it can be charged.
[The model of rounds](#recovery-in-rounds) covers this isolation.

## Recovery in rounds

If a process crashes while many messages are running, any one of them may be the cause. To find it,
these suspects run again in smaller and smaller groups
([Run suspects in rounds](../explanation/decisions/0029-run-suspects-in-rounds.md)).
`tests/protocol/rounds.pml` models this recovery. It has one or two partitions of a host, and each
worker may run several messages at a time, one in each of its *lanes*. Any message may be a *poison
message*, which crashes its process whenever it runs, or a *killer*, which takes down its host.
Processes and hosts may also be lost for other reasons, but only a limited number of times.

The invariants are:

1. A healthy message is charged only if its process or host was killed for another reason while it
   ran alone.
2. A message starts at most 1 + log2(lanes) times, and once more for each crash that it causes. Each
   lost host allows the same number of starts again.
3. Unless processes are killed from outside, a message takes down at most three hosts.
4. A message starts only after earlier messages of its key.
5. In every final state, all messages are acknowledged or dead-lettered. Every run reaches such a
   state, because invariant 2 limits the number of starts.

## Schedules

A schedule sends a message at each of its *ticks*, for example every hour.
`tests/protocol/schedule.pml` models one [schedule](../how-to/schedule-messages.md) and two
housekeepers, which both try to send its ticks. In the meantime, the schedule is edited, an operator
pauses and resumes it, and the server's clock is set back. A housekeeper may die between two steps,
and a call may be executed late.

The invariants are:

1. No tick is sent twice.
2. Nothing is sent before it is due.
3. Nothing is sent while the schedule is paused.
4. Once an edit has replaced a specification, nothing is sent for the old one.
5. In every final state, each past tick was either sent, or skipped because of `misfire` or an edit.

The model does not cover a schedule that moves to another partition, is removed, loses the instance
that declared it, or overlaps with its previous run. The kill points of
`tests/acceptance/test_schedules.py` and the contract tests cover these cases.

## Outboxes

An outbox is a database table from which a relay sends each row as a message and then deletes it
([Deduplicate outbox rows in the
partition](../explanation/decisions/0035-deduplicate-outbox-rows-in-the-partition.md)).
`tests/protocol/outbox.pml` models one outbox. It has two relays, rows with two keys, and a topic
that may grow. A relay may die or pause at any step, even for longer than its lease. When a relay
publishes or deletes rows, the reply may be lost, or the call may be executed late.

The invariants are:

1. No row is in the topic twice.
2. The rows of a key are in the order in which they were committed.
3. No row is deleted before it is in the topic.
4. In every final state, each committed row is in the topic and the table is empty.

The model leaves out rows of delayed sends, dead-lettered rows, rejected writes, and a server that
restarts without its last writes. The contract tests and the acceptance tests cover the first three.

## Verified variants

The following tables show how much Spin has checked. In each row, it visited all states of a model,
and all invariants hold. The scope lists how often each event may occur at most: for example, 2
acquisitions mean that an instance may acquire the lease twice, and 2 expiries that the lease may
expire twice. *States* and *transitions* are the numbers of different states, and of steps between
them. `make verify NAME=model` runs these variants:

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

If all invariants hold, the model may be correct, but it may also be unable to violate them. Each of
the following variants therefore removes one rule of the protocol, and Spin must find an invariant
that is then violated. The list also shows why the protocol has each of these rules.

The *trace* of a variant is the shortest sequence of events that violates the invariant. In the
traces, A and B are the two instances, housekeepers or relays. A number in parentheses is a token,
so `acquire(2)` is an acquisition with token 2. A number without a noun is a message or a row. *OK*
and *refused* are replies of the server.

"""

_FOUND = """
## Bugs found

The models have found two bugs, which are fixed:

- **A tick was sent twice.** This happened when a schedule was edited while a tick was due. The edit
  read the clock and computed the next due time. Before it wrote this time, a housekeeper sent the
  tick, so the edit made the same tick due again. `schedule_fire`, the script that sends a tick, now
  also compares it with the last tick that was sent.
- **An entry was handled half a minute late.** A worker takes over entries of other clients with the
  script `message_reclaim`. One such call was executed late. In between, the worker had reconnected
  and listed its pending entries. The late call then added an entry to them, which the worker did
  not notice until it compared its counts with those of the server. The script compared only the
  token, which was still valid. It now also compares the session, which identifies the connection.
"""


_BROKEN = {
    ("partition", "1"): "each message is in one place",
    ("partition", "2"): "a superseded token changes nothing",
    ("partition", "3"): "only pending messages start",
    ("partition", "4"): "no message starts too often",
    ("partition", "5"): "no message is charged too often",
    ("partition", "6"): "messages start in order",
    ("partition", "7"): "all messages are settled",
    ("rounds", "1"): "no healthy message is charged",
    ("rounds", "2"): "no message starts too often",
    ("rounds", "3"): "a message takes down at most three hosts",
    ("rounds", "4"): "messages of a key start in order",
    ("rounds", "5"): "all messages are settled",
    ("schedule", "1"): "no tick is sent twice",
    ("schedule", "2"): "nothing is sent early",
    ("schedule", "3"): "a paused schedule sends nothing",
    ("schedule", "4"): "a replaced specification sends nothing",
    ("schedule", "5"): "no tick is missed",
    ("outbox", "1"): "no row is in the topic twice",
    ("outbox", "2"): "rows of a key stay in order",
    ("outbox", "3"): "no row is deleted before it is sent",
    ("outbox", "4"): "all rows are sent",
}  # model and number of an invariant -> the invariant in short


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
    broken = _BROKEN[result.variant.model, result.violated]
    text = (
        f"- **{title}.** Normally, {result.variant.rule}. Without this rule, invariant"
        f" {result.violated} ({broken}) is violated.\n"
    )
    text = re.sub(r"\b[a-z]+_[a-z]+\b", r"`\g<0>`", text)
    return f"{text}  Trace: {' → '.join(result.trace)}\n"


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
