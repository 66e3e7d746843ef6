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
packet arrives late at the worst possible moment. Tests run this protocol many times, but they
cannot try every order of events. A model checker can. The checker [Spin](https://spinroot.com)
takes a *model*, which is a simplified description of the protocol, and visits every state that the
model can reach. In each state, it checks that certain statements hold, which are called
*invariants*.

There are four models: one for the ownership of a partition, one for recovery in rounds, one for
schedules and one for outboxes. Each model is limited to a few messages and faults, because the
number of states would otherwise be too large. The results are therefore strong evidence, but not a
proof.

`make verify NAME=model` checks the models in small scopes. It also checks *mutations*: in each of
them, one rule of the protocol is removed from a model, and Spin must then find an error. CI runs
this command for every change. The figures on this page were measured with the models whose digest
is {digest}.

## Partitions

`tests/protocol/partition.pml` models one partition and one group: how an instance acquires the
lease, how its worker fetches, handles and settles messages, and how another instance takes over.
The model has two instances, each with a supervisor and a worker, and also the server, the
housekeeper, and another client that reads from the group. Every script is one atomic step. Any
process may pause for any time, and the lease may expire at any moment.

A limited number of faults may occur. There are four kinds:

- A worker dies.
- A host is lost.
- A call is executed, but its reply is lost.
- A call is **executed late**: before the server executes it, its sender has given up waiting for
  the reply and has sent newer calls. Such calls are part of the model because they cause the worst
  bugs.

The invariants are:

1. Each message is in exactly one place: unread, pending, waiting retry, retry unread, retry
   pending, dead, acknowledged, or pending at another client.
2. A call with a superseded token changes nothing. A token is superseded when the server has
   accepted a newer one, for another owner or another worker process.
3. The owner starts only messages that are pending.
4. The handler of a message starts at most once, plus once for each failure, once for each crash
   that the message causes, and once for each owner that is lost after the start.
5. No message is charged with more crashes than it caused, with one exception. Before an owner runs
   messages of a lost owner, it writes a *mark* to Redis, which names the messages that are about to
   run. If this owner is lost too, the message of its mark is charged once.
6. When the owner starts messages for the first time, it follows the order of the stream.
7. In every final state with an owner of the partition, all messages are settled.

To keep the number of states small, the model leaves out the following parts of the protocol, which
the contract tests and the [fault battery](fault-battery.md) cover instead:

- a second group
- trimming
- time, and therefore the deadline until which a worker trusts its lease, and the rule that an
  instance must observe a silence twice before it takes over
- a mark without suspects
- retries that wait in the worker
- the command that takes over entries of other clients
- a server that restarts without its last writes
- several late calls at the same time

One detail differs from the code. In this model, a mark charges its message when the first owner is
lost, whereas the code first isolates the message, so that it runs alone before it can be charged.
[The model of rounds](#recovery-in-rounds) covers this isolation.

## Recovery in rounds

If a process crashes while many messages are running, any one of them may be the cause. To find it,
these suspects run again in smaller and smaller groups
([Run suspects in rounds](../explanation/decisions/0029-run-suspects-in-rounds.md)).
`tests/protocol/rounds.pml` models this recovery. The model has one or two partitions of one host.
Each worker may run several messages at a time, one in each of its *lanes*. Any message may be a
*poison message*, which crashes its process whenever it runs, or a *killer*, which takes down its
host. Processes and hosts may also be lost for other reasons, but only a limited number of times.

The invariants are:

1. A healthy message is charged only if its process or host was killed for another reason while it
   ran alone.
2. A message starts at most 1 + log2(lanes) times, plus once for each crash that it causes. For each
   lost host, the same number of starts is allowed again.
3. Unless processes are killed from outside, a message takes down at most three hosts.
4. A message starts only after earlier messages of its key.
5. In every final state, all messages are acknowledged or dead-lettered. Every run reaches such a
   state, because invariant 2 limits the number of starts.

## Schedules

A schedule sends a message at each of its *ticks*, for example every hour.
`tests/protocol/schedule.pml` models one [schedule](../how-to/schedule-messages.md) and two
housekeepers, which both try to send its ticks. While they do so, the schedule may be edited, an
operator may pause and resume it, and the server's clock may be set back. A housekeeper may die
between two steps, and a call may be executed late.

The invariants are:

1. No tick is sent twice.
2. Nothing is sent before it is due.
3. Nothing is sent while the schedule is paused.
4. Once an edit has replaced a specification, nothing is sent for the old one.
5. In every final state, each past tick was either sent, or skipped because of `misfire` or an edit.

The model does not cover a schedule that moves to another partition, is removed, is no longer
declared by any instance, or overlaps with its previous run. These cases are covered by the kill
points of `tests/acceptance/test_schedules.py` and by the contract tests.

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

The following tables show how much Spin has checked. For each variant, it visited all states that
the model can reach, and all invariants hold in every one of them. The scope limits how often each
event may occur. For example, 2 acquisitions mean that an instance may acquire the lease twice, and
2 expiries mean that the lease may expire twice. *States* is the number of different states, and
*transitions* is the number of steps between them. `make verify NAME=model` runs these variants:

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

If no invariant is ever violated, the protocol may be correct, but the model may also be too weak to
violate one. To rule out the second case, each of the following variants removes one rule of the
protocol, and Spin must then find an invariant that is violated. The list also shows why the
protocol needs each of these rules. An invariant has the number that it has in the section of its
model.

The *trace* of a variant is the shortest sequence of events that violates the invariant. Read it as
follows:

- A and B are the two instances, housekeepers or relays.
- A number in parentheses is a token, so `acquire(2)` is an acquisition with token 2.
- A number without a noun is a message or a row.
- *OK* and *refused* are replies of the server.
"""

_MODELS = {
    "partition": "The first rules belong to the [ownership of a partition](#partitions)",
    "rounds": "The following rules belong to the [recovery in rounds](#recovery-in-rounds)",
    "schedule": "The following rules belong to [schedules](#schedules)",
    "outbox": "The last rules belong to [outboxes](#outboxes)",
}  # model -> the sentence before its mutations

_FOUND = """
## Bugs found

The models have found two bugs, which are fixed:

- **A tick was sent twice.** This happened when a schedule was edited while a tick was due. The edit
  read the clock and computed the next due time, but before it wrote this time, a housekeeper sent
  the tick. The edit then made the same tick due again. To prevent this, the script that sends a
  tick, `schedule_fire`, now also compares it with the last tick that was sent.
- **An entry was handled half a minute late.** A worker takes over entries of other clients with the
  script `message_reclaim`. One such call was executed late, after the worker had reconnected and
  listed its pending entries. The call added an entry to those of the worker, which did not notice
  this until it compared its counts with those of the server. The script had compared only the
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
    text = re.sub(r"\b(?:[a-z]+_[a-z]+|[A-Z]{3,})\b", r"`\g<0>`", text)
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
    broken: list[str] = []
    for model, heading in _MODELS.items():
        mutations = [
            each for each in results if each.variant.breaks and each.variant.model == model
        ]
        broken += [f"\n{heading}:\n\n", *(_mutation(each) for each in mutations)]
    head = _HEAD.format(digest=digest()) + small + _FULL + large
    return head + _MUTATIONS + "".join(broken) + _FOUND
