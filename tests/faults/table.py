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
        "A worker dies in the middle of a message, through a segmentation fault, kill -9 or"
        " `os._exit`.",
        "Only the running message is charged with a crash. Before the supervisor forks the next"
        " worker, it replaces the token in the fence, the Redis hash that identifies the owner."
        " Redis therefore rejects calls of the dead worker that arrive late. The other messages"
        " of the batch stay pending for the next worker.",
    ),
    Row(
        "F2",
        "A worker dies after a handler has returned, before its message is acknowledged.",
        "The supervisor reads from shared memory that the message is finished. It acknowledges"
        " the message in the same step that replaces the token in the fence, so the message does"
        " not run again.",
        no_speed="the same as F1, because the process is replaced in the same way",
    ),
    Row(
        "F3",
        "A worker dies at each start, while it imports code or opens its connections.",
        "No message is charged, because none was running. The supervisor waits longer before each"
        " restart, and reports a crash loop after several failed starts. From then on, it"
        " releases the lease once per cool-down, so that another instance can try. Rebalancing"
        " does not move a partition to an instance on which its worker crashes in a loop.",
        no_speed="never, until the code is changed",
    ),
    Row(
        "F4",
        "A handler hangs and holds the interpreter's lock, so its soft limit has no effect.",
        "When the hard limit expires, the supervisor kills the worker and all its child"
        " processes. It charges only the message whose run exceeded the limit, and records the"
        " limit as the cause of the crash.",
        no_speed="the same as F1, from the kill at the hard limit",
    ),
    Row(
        "F5",
        "The kernel kills a worker because memory is short.",
        "The out-of-memory killer chooses a worker instead of the supervisor. The supervisor"
        " starts a new process for the partition, and records the kernel as the cause of the"
        " crash.",
        no_speed="the same as F1",
    ),
    Row(
        "F6",
        "The supervisor is killed with SIGKILL.",
        "All other processes of the instance exit within a second, even if a process is stuck in"
        " a handler. If a new supervisor starts on the same host, it takes over the leases"
        " immediately and acknowledges the finished messages. If exactly one message was running,"
        " the crash is charged to it. If no new supervisor starts, other instances take over"
        " within 1.6 times `lease_ttl`. No message is lost.",
    ),
    Row(
        "F7",
        "A host is lost with all its processes, including the server.",
        "Another instance takes over within 1.6 times `lease_ttl`. It cannot determine which"
        " pending messages were running on the lost host, so it runs them in small groups"
        " (rounds), and records each round in Redis before it starts (the mark). If a message"
        " also kills the next host, the mark shows which messages were running. No write that the"
        " server had synced to disk is lost.",
    ),
    Row(
        "F8",
        "A worker or a whole instance pauses for longer than the TTL and resumes.",
        "While the old owner was paused, its lease expired and another instance took over. When"
        " the old owner resumes, Redis rejects each of its calls, so they change nothing. It"
        " starts no further message and exits.",
    ),
    Row(
        "F9",
        "The server pauses for longer than the TTL, so that all leases expire together.",
        "All instances were unable to renew their leases, so none of them may take over from"
        " another. When the server resumes, each owner renews its expired leases and keeps the"
        " epochs. No partition changes its owner.",
    ),
    Row(
        "F10",
        "The clock of the server jumps by an hour, forward or back.",
        "No message is lost, and IDs and epochs keep increasing, because safety does not depend"
        " on the clock. After a jump forward, all leases have expired at once, so partitions can"
        " change their owner and a running message can run again. Nothing else causes a message to"
        " run again. Only the server's clock determines when a retry is due, and `streamqd doctor`"
        " reports how much this clock differs from the host's clock.",
        not_on={
            "redis7": "this build (Debian's, with jemalloc) does not start under libfaketime, so"
            " its clock cannot be set. Only the doctor's part is tested there."
        },
    ),
    Row(
        "F11",
        "The network drops all packets between an instance and the server, or those of one"
        " direction.",
        "An instance that cannot renew its lease stops starting messages before the lease can"
        " have expired on the server. Messages that are already running continue. If another"
        " instance takes over before they finish, Redis rejects their results, and the messages"
        " run again on the new owner.",
    ),
    Row(
        "F12",
        "A command is executed and its reply is lost: the outcome is unknown.",
        "Because every script is safe to repeat, the caller can call it again. No message is"
        " lost, and no effect is applied twice. If the reply to a read is lost, the worker lists"
        " its pending entries to find the messages that it did not receive. If the reply to a"
        " send is lost, the producer raises an error for an unknown outcome, unless a dedup ID"
        " allows it to repeat the send.",
        no_speed="the same as F13, because the call is repeated on a new connection",
    ),
    Row(
        "F13",
        "A connection is reset in the middle of a pipeline, at any byte.",
        "Redis does not execute an incomplete command. The commands before it may have been"
        " executed, and the caller detects this when it repeats them. No message is lost, and no"
        " effect is applied twice.",
    ),
    Row(
        "F14",
        "The server restarts without the last writes of its append-only file.",
        "If the acknowledgment of a message was in the lost part of the file, the message runs"
        " again. No other message runs again, and the only missing messages are those whose sends"
        " were in the lost part. The instances acquire their partitions again, with new epochs.",
    ),
    Row(
        "F15",
        "The server is empty: it restarted without its data, was flushed (FLUSHALL), or is the"
        " wrong database.",
        "The daemon creates its groups again, so that they receive all messages that are sent"
        " after the loss. It logs a warning, epochs keep increasing, and no process crashes in a"
        " loop.",
        no_speed="the backlog is lost with the data",
    ),
    Row(
        "F16",
        "The server answers LOADING, BUSY, MASTERDOWN, CLUSTERDOWN or TRYAGAIN.",
        "Each of these replies means that the server, or one node of a cluster, cannot execute"
        " commands at the moment. The process that receives it waits and tries again, with"
        " growing and randomized pauses. Workers trust their leases until the usual deadline, and"
        " no message is charged.",
        no_speed="the same as F9, from the time when the server accepts commands again",
    ),
    Row(
        "F17",
        "A master became a replica and answers READONLY, and the connection to it is still open.",
        "The client treats READONLY as a sign of a failover. It closes the connection and asks"
        " Sentinel for the new master, on which the instance acquires its leases again.",
        no_speed="not measured, because it depends on Sentinel",
    ),
    Row(
        "F18",
        "A failover loses the last writes.",
        "The new master has an older state. New epochs are still greater than all earlier epochs."
        " Messages whose acknowledgments were lost run again. A send can be lost only if it was"
        " not replicated yet, which the documentation describes as the window of a failover.",
        no_speed="not measured, because it depends on Sentinel",
    ),
    Row(
        "F19",
        "There are two masters at the same time.",
        "With the server setting `min-replicas-to-write`, the master without enough replicas"
        " rejects writes, so the checks at startup recommend this setting. Writes that this"
        " master accepted before it noticed the loss of its replicas can be lost, within the"
        " documented window of a failover.",
        no_speed="not measured, because it depends on Sentinel",
    ),
    Row(
        "F20",
        "The server no longer has the scripts, and answers NOSCRIPT.",
        "The client repeats the call once. This time, it sends the source of the script instead"
        " of the hash, with the same arguments.",
    ),
    Row(
        "F21",
        "The server's memory is full.",
        "Workers continue to read, handle and acknowledge messages, because acknowledging a"
        " message frees memory. Writes that need more memory have to wait: failed messages stay"
        " pending until their retries or dead letters can be written, and producers get an error."
        " No lease is lost.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F22",
        "The server rejects all writes: its disk is full (MISCONF), or replicas are missing"
        " (NOREPLICAS).",
        "Workers do not read any new messages. They finish the running ones, and repeat the"
        " acknowledgments until the server accepts them. After that, work continues, and no"
        " message runs twice.",
        no_speed="the same as F9, from the time when writes are accepted again",
    ),
    Row(
        "F23",
        "The server may evict keys.",
        "A server that evicts keys could delete messages or leases. The daemon therefore refuses"
        " to start, and names the server setting to change. With `redis.allow_eviction = true`,"
        " it starts anyway.",
        no_speed="the daemon does not start",
    ),
    Row(
        "F24",
        "Slots of a cluster move, so that nodes answer MOVED, ASK or TRYAGAIN.",
        "Calls follow the redirection to the new node of the slot, or wait until the slot has"
        " moved, even if this takes longer than a lease. No message is lost, and none runs twice.",
        no_speed="not measured, because it depends on how long the slots move",
    ),
    Row(
        "F25",
        "Another client trims the stream, so entries are pending although their bodies are gone.",
        "An entry without a body can never be handled, so it is acknowledged and counted as"
        " missing, with every version of the server. If the message was already running, the"
        " worker still has its body in memory, and uses it for a retry or a dead letter. No"
        " process waits for a missing body.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F26",
        "An operator deletes a group (`XGROUP DESTROY`), moves its position, or deletes its"
        " consumer under load.",
        "If a Redis client destroys a group, streamqd creates it again and lets it continue"
        " without skipping unread messages. No process crashes. The corresponding streamqd"
        " commands refuse to act as long as a partition has an owner or pending entries.",
        no_speed="not measured, because it depends on the command",
    ),
    Row(
        "F27",
        "A message kills the whole host.",
        "The instance that takes over runs the inherited entries in rounds. Before each round, it"
        " writes the places of its messages to Redis, as a mark. If a second host is lost, the"
        " entries of the mark become suspects, and each of them runs alone from then on. At the"
        " third loss, only the message that causes the losses was running. It is charged and"
        " becomes a dead letter. No other message is charged.",
        no_speed="not measured. Three hosts are lost, each as in F7.",
    ),
    Row(
        "F28",
        "All instances restart, or all leases expire, at the same time.",
        "Instances acquire partitions at different times and at a limited rate, so that they do"
        " not overload the server. Afterward, each instance has an equal share, and no more"
        " partitions move.",
        no_speed="not measured. Each partition recovers as in F7.",
    ),
    Row(
        "F29",
        "A group without readers blocks trimming.",
        "Retention must not remove messages that a group has not acknowledged, so the stream"
        " grows. A metric, an alert and `streamqd doctor` name the group and the number of"
        " entries that it holds back. The memory is freed only when an operator deletes the"
        " group.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F30",
        "Payloads are large.",
        "The worker limits the bytes of each fetch, so its memory use stays close to this limit,"
        " and the instance keeps its leases.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F31",
        "The daemon receives SIGTERM once or twice, a signal to all its processes, or a signal"
        " during a fork, or its drain deadline expires.",
        "The first SIGTERM or SIGINT starts the drain. A second SIGINT shortens the time for"
        " running messages, and a third one kills the workers. Workers ignore these signals"
        " themselves, because only their supervisor may stop them. Messages that have not started"
        " stay pending without a charge, and the leases are released after the workers have"
        " stopped.",
        no_speed="the daemon stops",
    ),
    Row(
        "F32",
        "Two supervisors have the same ID.",
        "The supervisor that notices the other one acquires no more partitions, logs an error,"
        " and exits with code 5.",
        not_on={
            "redis7": "this build (Debian's, with jemalloc) does not start under libfaketime, so"
            " its clock cannot be set back. The other tests of the row have passed there."
        },
        no_speed="no interruption: the other supervisor is not affected",
    ),
    Row(
        "F33",
        "A process with threads, locks, file descriptors and TLS sessions is forked.",
        "A forked child inherits no connection of its parent, and no other file descriptor that"
        " it does not need. Neither process deadlocks, and the parent's TLS sessions continue to"
        " work.",
        not_on=_WITHOUT_TLS,
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F34",
        "No process reads the log, or its disk is full.",
        "No process waits until it can write to the log. Lines that cannot be written are dropped"
        " and counted, and the instance keeps its leases.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F35",
        "A payload is hostile.",
        "Decoding a payload takes a limited amount of time and memory, and never executes code."
        " If the payload cannot be decoded, the message becomes a dead letter, and the worker"
        " continues with the next message.",
        no_speed="no interruption: messages are handled throughout",
    ),
    Row(
        "F36",
        "A host name does not resolve, or a certificate expires or is replaced.",
        "Processes try to connect again, after longer and longer pauses. If a certificate has"
        " expired, the error names it. A reload reads replaced certificates.",
        not_on=_WITHOUT_TLS,
        no_speed="the same as F11, from the time when the name or the certificate is right",
    ),
    Row(
        "F37",
        "A process started by a handler survives the kill of its worker.",
        "The supervisor kills the worker together with its process group, which contains the"
        " processes that the handler started. If a process has left the group, the supervisor"
        " adopts it, so that it does not remain as a zombie and is stopped together with the"
        " service. The supervisor never kills its own process group by mistake.",
        no_speed="the same as F1",
    ),
    Row(
        "F38",
        "A connection dies silently while new connections work: a proxy drops its packets, or a NAT"
        " loses its entry.",
        "A partition on which messages are running continues within 3 s. A partition that is idle"
        " starts a new message within 2 s. No message is lost or handled twice. If the server is"
        " only paused, the connection is not dead, so the daemon waits and opens few new"
        " connections.",
    ),
    Row(
        "F39",
        "The relay of an outbox dies, pauses for longer than its lease, or loses Redis or its"
        " database.",
        "Each committed row is in its topic exactly once, and no row of a rolled-back transaction"
        " is in a topic. Rows with the same key keep their order. If a relay is lost, another"
        " relay takes over. While Redis or the relay is unavailable, rows wait in the database.",
        no_speed="not measured, because the backlog is in the database",
    ),
)
