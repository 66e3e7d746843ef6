"""The rows of the fault table: each fault and the required behavior.

A test that shows the required behavior of a row, or a part of it, is marked with the row:

    @pytest.mark.fault("F12")

`test_table.py` requires a test for every row. A row without a test describes the failed attempts to
show it in `untested`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

UNTESTED_MAX = 3


class Row(NamedTuple):
    """One fault and the behavior that it requires.

    `untested` describes the failed attempt to show the behavior. It is '' if tests show it.

    `no_speed` gives the reason why no time until full speed is measured. It is '' if the row has a
    scenario that measures the time.

    `not_on` maps each server on which some of the row's tests cannot run to the reason.
    """

    name: str
    fault: str
    required: str
    untested: str = ""
    not_on: Mapping[str, str] = MappingProxyType({})
    no_speed: str = ""


_NO_TLS = "these builds do not support TLS. Tests without TLS run there too."
_WITHOUT_TLS = {"valkey": _NO_TLS, "redis62": _NO_TLS}


ROWS = (
    Row(
        "F1",
        "A worker dies in the middle of a message: a segmentation fault, kill -9, `os._exit`.",
        "The running message is charged with one crash, and no other message is charged. The"
        " supervisor replaces the token of the fence before it forks the next worker, so the dead"
        " worker's late calls are rejected. The other messages of the batch are untouched.",
    ),
    Row(
        "F2",
        "A worker dies after a handler has returned, before its message is acknowledged.",
        "The supervisor acknowledges the message in the same step that sets the new token, so"
        " the message does not run again.",
        no_speed="as F1: the process is replaced in the same way",
    ),
    Row(
        "F3",
        "A worker dies at each start: while it imports code or opens its connections.",
        "No message is charged. The supervisor waits longer before each restart, until it"
        " reports a crash loop. It then releases the lease once per cool-down, so that another"
        " instance can try, and the partition does not move to an instance where it crashes.",
        no_speed="never, until the code is changed",
    ),
    Row(
        "F4",
        "A handler hangs and holds the interpreter's lock, so its soft limit has no effect.",
        "At the hard limit, the supervisor kills the worker and all its child processes. It"
        " charges only the message that was running, and names the limit as the cause.",
        no_speed="as F1, from the kill at the hard limit",
    ),
    Row(
        "F5",
        "The kernel kills a worker because memory is short.",
        "The kernel kills a worker, and not the supervisor. The partition therefore continues"
        " with a new process, and the crash record names the kernel as the cause.",
        no_speed="as F1",
    ),
    Row(
        "F6",
        "The supervisor is killed with SIGKILL.",
        "All its processes exit within a second, even a process that cannot react. A successor"
        " on the same host continues with its leases immediately: it acknowledges finished"
        " messages, and charges a message that ran alone. If there is no successor, other"
        " instances take the leases over within 1.6 times `lease_ttl`. Nothing is lost.",
    ),
    Row(
        "F7",
        "A host is lost with all its processes, including the server.",
        "Another instance takes over within 1.6 times `lease_ttl`. It cannot know which pending"
        " messages were running, so it runs them in rounds under a durable mark. Nothing that the"
        " server wrote to disk is lost.",
    ),
    Row(
        "F8",
        "A worker or a whole instance pauses for longer than the TTL and resumes.",
        "Redis rejects every call of the old owner, so the calls change nothing. The old owner"
        " starts no message and exits.",
    ),
    Row(
        "F9",
        "The server pauses for longer than the TTL, so that all leases expire together.",
        "Owners renew their leases late and keep their epochs, so no instance takes a lease over.",
    ),
    Row(
        "F10",
        "The clock of the server jumps by an hour, forward or back.",
        "Safety does not depend on the clock: nothing is lost, and IDs and epochs keep growing."
        " A message repeats only because of a takeover, as a jump forward expires all leases."
        " Retries follow the server's clock alone, and the doctor reports how far it differs from"
        " the host's clock.",
        not_on={
            "redis7": "this build (Debian's, with jemalloc) does not start under libfaketime, so"
            " its clock cannot be set. Only the doctor's part is tested there."
        },
    ),
    Row(
        "F11",
        "The network drops all packets between an instance and the server, or those of one"
        " direction.",
        "A worker stops starting messages at its own deadline, which is before its lease can"
        " have expired. Once another instance has taken over, Redis rejects the results of"
        " messages that were still running.",
    ),
    Row(
        "F12",
        "A command is executed and its reply is lost: the outcome is unknown.",
        "Every script is safe to repeat, and every caller copes with a missing reply, so no message"
        " is lost and no effect is applied twice. After a read, the worker lists its pending"
        " entries. A send reports an unknown outcome, unless its dedup ID makes it safe to repeat.",
        no_speed="as F13: the call is repeated on a new connection",
    ),
    Row(
        "F13",
        "A connection is reset in the middle of a pipeline, at any byte.",
        "An incomplete command is not executed. Commands that were executed before the reset are"
        " detected, so nothing is lost and nothing happens twice.",
    ),
    Row(
        "F14",
        "The server restarts without the last writes of its append-only file.",
        "Messages whose acknowledgment was lost run again, but no others. The only messages that"
        " are missing are those that were sent in the lost part of the file. Work continues with"
        " new epochs.",
    ),
    Row(
        "F15",
        "The server is empty: it restarted without its data, was flushed (FLUSHALL), or is the"
        " wrong database.",
        "Groups are created again without skipping unread messages, and epochs keep growing. A"
        " warning is logged, and no process crashes in a loop.",
        no_speed="the backlog is lost with the data",
    ),
    Row(
        "F16",
        "The server answers LOADING, BUSY, MASTERDOWN, CLUSTERDOWN or TRYAGAIN.",
        "Every process backs off with jitter. Leases are trusted until their deadline,"
        " and no message is charged.",
        no_speed="as F9, once the server answers otherwise",
    ),
    Row(
        "F17",
        "READONLY: a master became a replica, and the connection to it is still open.",
        "The client closes the connection and finds the new master, where the instance acquires"
        " its leases.",
        no_speed="not measured: it depends on Sentinel",
    ),
    Row(
        "F18",
        "A failover loses the last writes.",
        "New epochs are greater than all earlier epochs. Messages whose acknowledgment was lost"
        " run again. Sends can be lost only within the documented window.",
        no_speed="not measured: it depends on Sentinel",
    ),
    Row(
        "F19",
        "There are two masters at the same time.",
        "With `min-replicas-to-write`, the master in the minority rejects writes, so the start"
        " checks recommend this setting. Writes that the master accepted before can be lost"
        " within the documented window.",
        no_speed="not measured: it depends on Sentinel",
    ),
    Row(
        "F20",
        "NOSCRIPT: the server no longer has the scripts.",
        "The client repeats the call once, with the source of the script and the same arguments.",
    ),
    Row(
        "F21",
        "The server's memory is full.",
        "Workers continue to read, handle and acknowledge messages, because this frees memory."
        " Retries and dead letters stay pending until there is room, and producers get an error."
        " No lease is lost.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F22",
        "The server rejects all writes: its disk is full (MISCONF), or replicas are missing"
        " (NOREPLICAS).",
        "Workers read nothing, finish running messages, and repeat their acknowledgments until"
        " the server accepts them. When writes are accepted again, everything continues, and no"
        " message runs twice.",
        no_speed="as F9, once writes are accepted",
    ),
    Row(
        "F23",
        "The server may evict keys.",
        "The daemon refuses to start and names the setting to change. With"
        " `redis.allow_eviction`, it starts nevertheless.",
        no_speed="the daemon does not start",
    ),
    Row(
        "F24",
        "Slots of a cluster move: MOVED, ASK, TRYAGAIN.",
        "Calls follow the redirection or wait, even for longer than a lease lasts. Nothing is lost,"
        " and nothing runs twice.",
        no_speed="not measured: it depends on how long the slots move",
    ),
    Row(
        "F25",
        "Another client trims the stream, so entries are pending although their bodies are gone.",
        "With every version of the server, the pending entries are acknowledged and counted. If"
        " such an entry is running, the worker uses the body in its memory. No process waits for"
        " a missing body.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F26",
        "An operator deletes a group (`XGROUP DESTROY`), moves its position, or deletes its"
        " consumer under load.",
        "A destroyed group is created again without skipping unread messages, and work continues"
        " without a crash. The streamqd commands for these actions are rejected as long as the"
        " partition is owned or has pending entries.",
        no_speed="not measured: it depends on the command",
    ),
    Row(
        "F27",
        "A message kills the whole host.",
        "Inherited entries run in rounds under a durable mark. After a second loss, the entries"
        " that the marks name are accused and run alone. The message that kills its hosts is"
        " therefore charged at the third loss and becomes a dead letter, and no other message is"
        " charged.",
        no_speed="not measured: three hosts are lost, each as in F7",
    ),
    Row(
        "F28",
        "All instances restart, or all leases expire, at the same time.",
        "Instances acquire partitions at a bounded rate and at different times, so there is no"
        " stampede. Afterward, the fleet is balanced, and no partition moves.",
        no_speed="not measured: as F7 for all partitions",
    ),
    Row(
        "F29",
        "A group without readers blocks trimming.",
        "Metrics, the alert and the doctor name the group and the number of entries that it"
        " keeps. The stream is freed only when an operator deletes the group.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F30",
        "Payloads are large.",
        "The number of bytes that a worker fetches is limited, so memory stays near this limit,"
        " and leases are kept.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F31",
        "Signals: SIGTERM once or twice, the deadline, signals to all processes, a signal while the"
        " supervisor forks.",
        "The first signal starts the drain, later signals shorten it, and the last signal kills"
        " the workers. Workers obey only their supervisor. Messages that had not started are"
        " untouched, and leases are released last.",
        no_speed="the daemon stops",
    ),
    Row(
        "F32",
        "Two supervisors have the same ID.",
        "One of them acquires no more partitions, and exits with code 5 and an error.",
        not_on={
            "redis7": "this build (Debian's, with jemalloc) does not start under libfaketime, so"
            " its clock cannot be set back. The other tests of the row have passed there."
        },
        no_speed="no interruption: the first supervisor is not affected",
    ),
    Row(
        "F33",
        "Forking with threads, locks, file descriptors and TLS sessions.",
        "A child keeps neither a connection of its parent nor any other file descriptor that it"
        " does not need. Nothing deadlocks, and the parent's sessions continue.",
        not_on=_WITHOUT_TLS,
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F34",
        "No process reads the log, or its disk is full.",
        "No process waits for the log. Lines that cannot be written are dropped and counted, and"
        " leases are kept.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F35",
        "A payload is hostile.",
        "Decoding is bounded and executes nothing. The message becomes a dead letter, and the"
        " worker continues.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F36",
        "A host name does not resolve, or a certificate expires or is replaced.",
        "Connecting is repeated with growing delays. The error about an expired certificate"
        " names the certificate, and a reload reads new certificates.",
        not_on=_WITHOUT_TLS,
        no_speed="as F11, once the name or the certificate is right",
    ),
    Row(
        "F37",
        "A process started by a handler survives the kill of its worker.",
        "The process is killed with the worker's process group. If it has left the group, it is"
        " adopted, never stays a zombie, and exits with the service. The supervisor cannot kill"
        " its own group.",
        no_speed="as F1",
    ),
    Row(
        "F38",
        "A connection dies silently while new connections work: a proxy drops its packets, or a NAT"
        " loses its entry.",
        "A busy partition continues within 3 s, and an idle partition starts a message within 2"
        " s. Nothing is lost, and nothing is handled twice. If the server only pauses, the daemon"
        " waits and opens few new connections.",
    ),
    Row(
        "F39",
        "The relay of an outbox dies, pauses for longer than its lease, or loses Redis or its"
        " database.",
        "Each committed row is in its topic once, and no rolled-back row is in a topic. Rows of"
        " a key keep their order. If a relay is lost, another relay takes over. While Redis or"
        " the relay is unavailable, rows wait in the database.",
        no_speed="not measured: the backlog is in the database",
    ),
)
