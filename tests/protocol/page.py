"""The results as lines for a terminal and as a page of the documentation."""

from __future__ import annotations

import hashlib
import inspect
import re

from tests.protocol import variants
from tests.protocol.checker import MODEL, Checked

_HEAD = """\
<!-- Written by `make verify NAME=model-full`: do not edit. -->

# The protocol, checked

`tests/protocol/partition.pml` is the protocol of one partition and one group as a model for
[Spin](https://spinroot.com): two instances, each with a supervisor and a worker, the server, the
housekeeper, a foreign client. Every script is one atomic step; any process may stand still for any
time; the lease may expire at any moment. A budget of faults pays for what goes wrong: a worker
dies, a host is lost, the reply of a call is lost, and a call is **executed late**, at any later
time, after its sender gave up and after newer calls. Without late packets the worst flaws stay
invisible.

Spin visits every state that can be reached and checks in each:

1. Each message is in exactly one place: unread, pending, delayed, retry unread, retry pending,
   dead, acknowledged, or pending at a foreign client.
2. A superseded token changes nothing.
3. The owner starts nothing that is not pending.
4. A handler is started at most once, and once more for each failure, each crash of its own, and
   each loss of its owner while it was begun.
5. No message is charged with more crashes than it caused, but for the mark of a replaced owner,
   which is charged once.
6. The owner's first starts are in the order of the stream.
7. Whenever nothing more happens by itself and somebody owns the partition, everything is settled.

The bounds are small, so this is evidence and no proof. Not modelled: two groups, trimming, time
itself (the worker's trust deadline, the second look before a takeover), concurrency in a worker and
the mark that suspects nobody, retries that hold their place, adoption, a server that restarts
without its last writes, and more than one late call at a time. The contract tests and the fault
battery have these.

`make verify NAME=model` runs the small scopes and all mutations; CI runs it for every change. The
model of these figures: {digest}.

## The protocol holds

| Variant | Scope | States | Transitions |
| --- | --- | --- | --- |
"""

_MUTATIONS = """
## Each rule is needed

One rule is taken out at a time, and Spin finds what it was for. These are its shortest
counterexamples. Numbers in brackets are tokens, other numbers messages.

| Taken out | The rule | Breaks | How |
| --- | --- | --- | --- |
"""

_FOUND = """
## What the model found

The late copy of a reclaim. `message_reclaim` compared the token alone: its copy, executed after the
worker had connected anew and listed its pending entries, moved a foreign client's entry into the
owner's list without anybody knowing. The entry waited for the next comparison of counts, half a
minute later. The script compares the session now, as the read and the mark do.
"""


def line(result: Checked) -> str:
    """One line for a terminal."""
    variant = result.variant
    ending = f"invariant {result.violated} breaks" if result.violated else "all hold"
    verdict = "" if result.expected else "   <-- wrong"
    kind = "without the rule: " if variant.breaks else ""
    return f"{kind}{variant.title} ({scope(result)}): {ending}, {result.states:,} states{verdict}"


def scope(result: Checked) -> str:
    """The bounds of a run."""
    defines = {"N": 2, **result.variant.defines}
    words = {
        "N": "messages",
        "FAULTS": "faults",
        "ACQUISITIONS": "acquisitions",
        "EXPIRIES": "expiries",
        "RELEASES": "releases",
        "RELOADS": "reloads",
        "FOREIGN": "foreign reads",
    }
    return ", ".join(f"{defines[name]} {word}" for name, word in words.items() if defines.get(name))


def digest() -> str:
    """What tells this model and its variants from others; comments do not matter."""
    model = re.sub(r"/\*.*?\*/", "", MODEL.read_text(), flags=re.DOTALL)
    return hashlib.sha256((model + inspect.getsource(variants)).encode()).hexdigest()[:16]


def render(results: list[Checked]) -> str:
    """The page."""
    holding = [
        f"| {each.variant.title} | {scope(each)} | {each.states:,} | {each.transitions:,} |\n"
        for each in results
        if not each.variant.breaks
    ]
    broken = [
        f"| {each.variant.title} | {each.variant.rule} | {each.violated} |"
        f" {'; '.join(each.trace)} |\n"
        for each in results
        if each.variant.breaks
    ]
    return _HEAD.format(digest=digest()) + "".join(holding) + _MUTATIONS + "".join(broken) + _FOUND
