"""The rows of the fault table: what goes wrong, and what must come of it.

A test that shows the required behaviour of a row, or a part of it, is marked with it:

    @pytest.mark.fault("F12")

`test_table.py` demands a test of every row. A row without one says in `untested` what was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

UNTESTED_MAX = 3


class Row(NamedTuple):
    """One fault. `untested` is the failed attempt to show it, '' for a row that tests show.

    `not_on` are servers on which not all of its tests can run, each with a sentence that says why.
    """

    name: str
    fault: str
    required: str
    untested: str = ""
    not_on: Mapping[str, str] = MappingProxyType({})


_NO_TLS = "these builds speak no TLS; what needs none is shown there too."
_WITHOUT_TLS = {"valkey": _NO_TLS, "redis62": _NO_TLS}


ROWS = (
    Row(
        "F1",
        "A worker dies in the middle of a message: a segmentation fault, kill -9, `os._exit`.",
        "The message that ran is charged with one crash, and no other. The supervisor replaces the"
        " fence's token first and forks the next worker then. The rest of the batch is untouched.",
    ),
    Row(
        "F2",
        "A worker dies after a handler has returned and before it is acknowledged.",
        "The supervisor acknowledges it together with the new token: it does not run again.",
    ),
    Row(
        "F3",
        "A worker dies whenever it starts: while it imports code or opens its connections.",
        "No message is charged. Restarts wait longer and longer until the breaker opens; the lease"
        " is given back once for each cool-down, and the partition is not sent where it crashes.",
    ),
    Row(
        "F4",
        "A handler hangs with the interpreter's lock held: its soft limit cannot run.",
        "At the hard limit the supervisor kills the worker with everything that it has started,"
        " charges that message alone and names the limit as the cause.",
    ),
    Row(
        "F5",
        "The kernel kills a worker because memory is short.",
        "Workers are chosen before the supervisor, the unit goes on without the killed process, and"
        " the crash record says that it was the kernel's choice.",
    ),
    Row(
        "F6",
        "The supervisor is killed with SIGKILL.",
        "All its processes are gone within a second, also those that cannot listen. A successor"
        " on the host goes on with its leases at once: what had ended is acknowledged, one that"
        " ran alone is charged. Others take them within one ttl. Nothing is lost.",
    ),
    Row(
        "F7",
        "A host is lost with all its processes, the server too.",
        "Another instance takes over within one ttl; what was in hand runs alone under a durable"
        " mark; nothing that the server had written is lost.",
    ),
    Row(
        "F8",
        "A worker or a whole instance stands still for longer than the ttl and comes back.",
        "Every call of the old owner is refused and changes nothing; it begins nothing more and"
        " ends.",
    ),
    Row(
        "F9",
        "The server stands still for longer than the ttl, so that all leases expire at once.",
        "Owners renew late and keep their epochs. Nobody takes anything over.",
    ),
    Row(
        "F10",
        "The clock of the server jumps by an hour, forward or back.",
        "Safety does not depend on it: nothing is lost, ids and epochs go on growing, and only a"
        " takeover explains a repeated run (a jump forward ends all leases). Retries come by the"
        " server's clock alone, and the doctor reports the difference.",
        not_on={
            "redis7": "this build (Debian's, with jemalloc) does not start under libfaketime, so"
            " its clock cannot be set; the doctor's part is shown there."
        },
    ),
    Row(
        "F11",
        "The network swallows everything between an instance and the server, or one direction.",
        "At its own deadline, before the lease can have expired, a worker begins no more messages."
        " What it finishes is refused once another instance has taken over.",
    ),
    Row(
        "F12",
        "A command is executed and its reply is lost: the outcome is unknown.",
        "Every script is safe to repeat, every caller handles the loss: nothing lost, no effect"
        " twice. A read is followed by a look at what is pending. A send reports what it does not"
        " know, unless its dedup id makes repeating safe.",
    ),
    Row(
        "F13",
        "A connection is reset in the middle of a pipeline, at any byte.",
        "Half a command is not executed, and what was executed is found: nothing lost, nothing"
        " twice.",
    ),
    Row(
        "F14",
        "The server restarts without the last writes of its append-only file.",
        "Acknowledgements that were lost mean repeated runs of exactly those messages; only what"
        " was sent within the lost tail is missing; work goes on with new epochs.",
    ),
    Row(
        "F15",
        "The server is empty: restarted without its data, FLUSHALL, the wrong database.",
        "Groups are made again where nothing unread is skipped, epochs go on growing, it is told"
        " loudly, and nothing crashes in a loop.",
    ),
    Row(
        "F16",
        "The server answers LOADING, BUSY, MASTERDOWN, CLUSTERDOWN or TRYAGAIN.",
        "Everybody waits longer and longer with jitter. Leases are believed for as long as they"
        " may be, and no message is charged.",
    ),
    Row(
        "F17",
        "READONLY: a master became a replica, and the connection to it still lives.",
        "The connection is given up, the master is looked for, leases are acquired there.",
    ),
    Row(
        "F18",
        "A failover loses the last writes.",
        "Epochs are greater than all before them. Acknowledgements that were lost mean repeated"
        " runs; sends that were lost are the documented window.",
    ),
    Row(
        "F19",
        "Two masters at once.",
        "With `min-replicas-to-write` the minority refuses writes, which the start checks advise;"
        " what the minority accepted is the documented window.",
    ),
    Row(
        "F20",
        "NOSCRIPT: the server has forgotten the scripts.",
        "The call is repeated by its source, with equal arguments, once.",
    ),
    Row(
        "F21",
        "The server's memory is full.",
        "Reading, handling and acknowledging go on, for they free memory. Retries and dead letters"
        " stay pending until there is room, producers are told, leases are kept.",
    ),
    Row(
        "F22",
        "The server refuses all writes: its disk is full (MISCONF), replicas are missing"
        " (NOREPLICAS).",
        "Nothing is read, what runs is finished, acknowledgements are repeated until they are"
        " answered. When writes are accepted again everything goes on without a repeated run.",
    ),
    Row(
        "F23",
        "The server may evict keys.",
        "The daemon refuses to start and says which setting must change; a setting overrides that.",
    ),
    Row(
        "F24",
        "Slots of a cluster move: MOVED, ASK, TRYAGAIN.",
        "Calls follow or wait, also for longer than a lease lives; nothing is lost, nothing runs"
        " twice.",
    ),
    Row(
        "F25",
        "Somebody else trims the stream: entries are pending, and their bodies are gone.",
        "They are settled and counted on every version; what runs is settled with the body that"
        " the worker has; nobody waits for them.",
    ),
    Row(
        "F26",
        "An operator destroys a group, moves its position, or deletes its consumer under load.",
        "A destroyed group is made again without skipping unread messages; work goes on without a"
        " crash; the verbs for all this refuse as long as anything is owned or pending.",
    ),
    Row(
        "F27",
        "A message kills the whole host.",
        "Inherited entries run in rounds under a durable mark. A second loss accuses the entries of"
        " the marks, which run alone then. The killer is charged at its third host and becomes a"
        " dead letter. No other message is charged.",
    ),
    Row(
        "F28",
        "All instances restart, or all leases expire, at once.",
        "Acquiring is spread and bounded; the fleet comes to rest in balance.",
    ),
    Row(
        "F29",
        "A group that nobody reads any more holds the trimming.",
        "It is named with what it keeps, in metrics, by the alert and by the doctor. Only an"
        " explicit deletion frees the stream.",
    ),
    Row(
        "F30",
        "Giant payloads.",
        "What is in hand is bounded by bytes; memory stays near that bound; leases are kept.",
    ),
    Row(
        "F31",
        "Signals: SIGTERM once or twice, the deadline, signals to all processes, a signal while the"
        " supervisor forks.",
        "The first one drains, repeated ones shorten, the last kills. Workers obey only their"
        " supervisor. Messages that were not begun are untouched, leases are released last.",
    ),
    Row(
        "F32",
        "Two supervisors under one id.",
        "One of them ends with code 5 and a message, and acquires nothing any more.",
        not_on={
            "redis7": "this build (Debian's, with jemalloc) does not start under libfaketime, so"
            " its clock cannot be set back; the other tests of the row have passed there."
        },
    ),
    Row(
        "F33",
        "Forking with threads, locks, descriptors and TLS sessions.",
        "A child has no connection of its parent and no descriptor that it does not need; nothing"
        " deadlocks; the parent's sessions live on.",
        not_on=_WITHOUT_TLS,
    ),
    Row(
        "F34",
        "Nobody reads the log, or its disk is full.",
        "Nothing waits for the log. Lines are dropped and counted, leases are kept.",
    ),
    Row(
        "F35",
        "A hostile payload.",
        "Decoding is bounded and executes nothing; the message dies, the worker lives.",
    ),
    Row(
        "F36",
        "A host name does not resolve, a certificate expires or is replaced.",
        "Connecting is tried again later and later; an expired certificate is refused by name; a"
        " reload reads new certificates.",
        not_on=_WITHOUT_TLS,
    ),
    Row(
        "F37",
        "What a handler has started survives the kill of its worker.",
        "It dies with the worker's process group. What has left the group is adopted, never stays a"
        " zombie, and ends with the service; the supervisor can never hit itself.",
    ),
    Row(
        "F38",
        "A connection dies without a word, and new connections work: a proxy that swallows, a NAT"
        " that forgets.",
        "A busy partition goes on within 3 s, an idle one begins a message within 2 s. Nothing is"
        " lost, and nothing is handled twice. A server that stands still is waited for, with few"
        " more connections.",
    ),
)
