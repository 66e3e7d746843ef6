"""The registry of log events: the name, level, meaning and fields of each, by section.

The reference page is generated from it.
"""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One event. Its fields do not include those that every line has, such as `ts`."""

    level: str
    """The level, or two levels separated by a comma."""
    meaning: str
    """A sentence about the event, its effect on messages, and any action for the operator."""
    fields: tuple[str, ...] = ()
    """All fields that the event can have. A line omits fields without a value."""


ASSIGNMENT = ("topic", "partition", "group")
_DIRECTIVE = ("directive", "to", "by", "why")
_DURATION = ("seconds", "failures")
_FAILED_MESSAGE = (*ASSIGNMENT, "uid", "attempt", "reason", "error", "at")
_TRACE = ("trace_id", "span_id")

SECTIONS: dict[str, dict[str, Event]] = {
    "Startup and shutdown": {
        "burst.finished": Event(
            "info",
            "With `--burst`, no messages are left to handle, except in `broken` partitions whose"
            " workers crash in a loop. The daemon exits.",
            ("broken",),
        ),
        "config.warning": Event(
            "warning",
            "A setting, or a setting of the Redis server, is valid but not recommended. `about`"
            " contains the reason.",
            ("about",),
        ),
        "daemon.ready": Event(
            "info",
            "Startup is complete. The daemon handles messages of `partitions` partitions, or waits"
            " for partitions.",
            ("partitions",),
        ),
        "daemon.started": Event(
            "info",
            "The daemon started. Its groups read `assignments` partitions of `topics` topics.",
            ("instance", "config", "topics", "assignments", "redis", "python"),
        ),
        "drain.expired": Event(
            "warning",
            "`drain_timeout` passed while messages were running, so the workers are killed. These"
            " messages run again on the next owner.",
        ),
        "drain.finished": Event(
            "info",
            "The daemon stopped and exits with `code`. Code 0 means that all running messages"
            " finished and all partitions were released.",
            ("code",),
        ),
        "drain.started": Event(
            "info",
            "The daemon stops fetching messages. Running messages have `timeout` seconds to"
            " finish.",
            ("timeout",),
        ),
        "import.delayed": Event(
            "warning",
            "The import of the handler modules takes longer than 2 s. Workers start when it has"
            " finished.",
            ("about",),
        ),
        "signal.received": Event("info", "The daemon received a signal.", ("signal",)),
        "start.refused": Event(
            "error",
            "The daemon cannot start, and exits with `code`. Each problem has its own line.",
            ("error", "code"),
        ),
    },
    "Reload": {
        "reload.edited": Event(
            "info", "`--reload` detected that `file` was saved. A reload starts.", ("file",)
        ),
        "reload.finished": Event("info", "All workers run the new configuration and code."),
        "reload.refused": Event(
            "error",
            "The new configuration or code is not valid (`problem`). The old configuration and"
            " code stay in effect.",
            ("problem",),
        ),
        "reload.requested": Event(
            "info", "An operator requested a reload, which this instance starts now.", ("at",)
        ),
        "reload.restart_required": Event(
            "warning", "Changes to `settings` take effect only after a restart.", ("settings",)
        ),
        "reload.started": Event(
            "info", "The daemon checks the new configuration and code after a reload request."
        ),
        "reload.stopped": Event(
            "error",
            "A replacement worker did not start (`problem`), so the reload stopped. The other"
            " `workers` workers keep the old code.",
            (*ASSIGNMENT, "workers", "problem"),
        ),
        "reload.validated": Event(
            "info",
            "The new configuration and code are valid. The workers of `partitions` partitions are"
            " replaced one by one.",
            ("partitions",),
        ),
    },
    "Instances and their limits": {
        "capacity.raised": Event(
            "info",
            "The operating system allows this instance to start processes again. The fleet assigns"
            " up to `partitions` partitions to it, or any number if this field is absent.",
            ("partitions",),
        ),
        "capacity.reduced": Event(
            "error",
            "The operating system refuses to start more processes (`error`). This instance"
            " released `given_up` partitions, which other instances take over. Raise the limit of"
            " processes, file descriptors or memory.",
            ("partitions", "given_up", "error"),
        ),
        "duplicate_instance.exited": Event(
            "error",
            "Another live instance (`other_host`, `other_pid`) has the same `daemon.instance`, so"
            " this instance exits with code 5. Set another `daemon.instance` and"
            " `daemon.state_dir`.",
            ("instance", "other_host", "other_pid"),
        ),
        "fork.failed": Event(
            "warning",
            "The operating system refuses to start another process. The daemon retries every"
            " second for 3 s.",
            ("error",),
        ),
        "fork.recovered": Event("info", "The operating system starts processes again.", _DURATION),
        "instance.crash_looped": Event(
            "critical",
            "The workers of every partition of this instance crash in a loop. The daemon exits"
            " with code 7.",
            ("assignments", "error"),
        ),
        "instance.duplicated": Event(
            "warning",
            "Another daemon (`other_host`, `other_pid`) has the same `daemon.instance`, so this"
            " daemon owns no partition yet. It starts when the other daemon has drained, or sends"
            " no heartbeat for `lease_ttl`. Otherwise, it exits with code 5 after two more"
            " heartbeats of the other daemon.",
            ("instance", "other_host", "other_pid"),
        ),
        "instance.frozen": Event(
            "warning",
            "This instance was suspended, or got no CPU time, for `seconds` seconds (more than"
            " 5 s). `timeout` and `hard_timeout` do not include this time.",
            ("seconds",),
        ),
    },
    "Leases and rebalance": {
        "lease.acquired": Event(
            "info",
            "This instance acquired the partition. If the previous owner did not release it"
            " (`inherited`), messages that were in flight run again. If a crash is counted against"
            " a message, `suspected` is its place.",
            (*ASSIGNMENT, "epoch", "inherited", "suspected"),
        ),
        "lease.lost": Event(
            "warning",
            "Another instance acquired the partition, usually because this instance did not renew"
            " the lease in time. The worker of this instance is stopped.",
            (*ASSIGNMENT, "epoch"),
        ),
        "lease.released": Event(
            "info", "This instance released the partition.", (*ASSIGNMENT, "epoch")
        ),
        "lease.renewed_late": Event(
            "warning",
            "This instance renewed a lease that had expired. The owner did not change.",
            (*ASSIGNMENT, "epoch"),
        ),
        "lease.resumed": Event(
            "info",
            "The previous supervisor of this instance was killed, and this instance continues with"
            " its partition. `done` finished messages are acknowledged. If only one message was"
            " running (`running`), a crash is counted against it.",
            (*ASSIGNMENT, "epoch", "done", "running"),
        ),
        "partition.handed_over": Event(
            "info",
            "A partition moves to another instance, because the fleet is rebalanced.",
            (*ASSIGNMENT, "epoch"),
        ),
        "request.fenced": Event(
            "warning",
            "Redis rejected a request of this worker and changed nothing, because the partition"
            " has a newer owner.",
            (*ASSIGNMENT, "epoch"),
        ),
        "scoreboard.found": Event(
            "info",
            "The daemon read the scoreboard file of a killed supervisor. It lists the messages"
            " that its workers finished.",
            ("file", "assignments"),
        ),
        "scoreboard.private": Event(
            "warning",
            "The scoreboard is not stored in a file (`problem`). If the supervisor is killed,"
            " messages that its workers finished but did not yet acknowledge run again.",
            ("problem",),
        ),
        "scoreboard.refused": Event(
            "warning",
            "The scoreboard file of a killed supervisor, or the part of one partition, is damaged"
            " or belongs to another instance. It is ignored, so messages that were in flight may"
            " run again. A damaged file is renamed. Delete it when you know the cause.",
            (*ASSIGNMENT, "file", "problem"),
        ),
    },
    "Workers": {
        "assignment.given_up": Event(
            "error",
            "An internal error of streamqd (`error`) affected one partition of a group. Its worker"
            " was killed and its lease released, so unacknowledged messages run again. The"
            " partition starts again after `seconds` seconds. Report the traceback.",
            (*ASSIGNMENT, "seconds", "error"),
        ),
        "loop.blocked": Event(
            "warning",
            "A coroutine has blocked the event loop of its worker for `seconds` seconds, so no"
            " other coroutine of the partition continues. `file`, `line` and `function` identify"
            " the code, and `traceback` is the stack of the loop. Without `file`, another thread"
            " holds the GIL, or the process is stopped. `messages` lists the oldest of the"
            " `running` messages. The event is repeated at intervals that double.",
            (
                *(*ASSIGNMENT, "child", "seconds", "file", "line", "function"),
                *("running", "messages"),
            ),
        ),
        "loop.resumed": Event(
            "info",
            "An event loop that was blocked for `seconds` seconds runs again.",
            (*ASSIGNMENT, "child", "seconds"),
        ),
        "standby.failed": Event(
            "warning",
            "A replacement worker crashed while it booted. The current worker continues.",
            (*ASSIGNMENT, "child", "how"),
        ),
        "standby.given_up": Event(
            "error",
            "Replacement workers crashed repeatedly while they booted, so the replacement is"
            " postponed for `seconds` seconds. The current worker continues.",
            (*ASSIGNMENT, "last_exit", "seconds"),
        ),
        "standby.ready": Event(
            "info",
            "A replacement worker has booted. It takes over when the current worker releases the"
            " partition.",
            (*ASSIGNMENT, "child"),
        ),
        "standby.started": Event(
            "info",
            "A replacement worker boots while the current worker continues.",
            (*ASSIGNMENT, "child"),
        ),
        "worker.boot_failed": Event(
            "error",
            "A worker exited before it was ready, because its handler could not be imported or"
            " `on_start` failed (`error`).",
            (*ASSIGNMENT, "error"),
        ),
        "worker.charged": Event(
            "warning",
            "A message was running when its worker crashed. The crash is counted against the"
            " message.",
            (*ASSIGNMENT, "epoch"),
        ),
        "worker.crash_looped": Event(
            "error",
            "The worker of a partition crashed repeatedly (`crash_loop`). Another instance takes"
            " over the partition, or this instance starts the worker again after"
            " `crash_cooldown`.",
            (*ASSIGNMENT, "last_exit", "seconds"),
        ),
        "worker.crashed": Event(
            "warning",
            "A worker crashed (`how`). `charged` is the message that the crash is counted against.",
            (*ASSIGNMENT, "child", "how", "reason", "charged"),
        ),
        "worker.exited": Event(
            "info, warning",
            "A worker exited as requested (`reason`). At level `warning`, it had finished its"
            " messages, and then exited with an error.",
            (*ASSIGNMENT, "child", "how", "reason", "charged"),
        ),
        "worker.forked": Event(
            "error",
            "A process that a handler forked returned from the handler instead of exiting. The"
            " process was stopped.",
            (*ASSIGNMENT, "parent", "error"),
        ),
        "worker.handed_over": Event(
            "info",
            "A replacement worker took over from its predecessor.",
            (*ASSIGNMENT, "child", "epoch"),
        ),
        "worker.hook_failed": Event(
            "error",
            "The `on_stop` hook raised an exception. The worker exits anyway.",
            (*ASSIGNMENT, "error"),
        ),
        "worker.killed": Event(
            "warning",
            "A worker was killed (`reason`), for example because a run, `on_stop` or the drain"
            " exceeded its time limit.",
            (*ASSIGNMENT, "child", "reason"),
        ),
        "worker.limit_exceeded": Event(
            "warning",
            "A worker exceeded `max_rss` with its first message. Raise `max_rss`.",
            (*ASSIGNMENT, "rss", "baseline", "max_rss"),
        ),
        "worker.ready": Event(
            "info",
            "A worker loaded its handler and fetches messages.",
            (*ASSIGNMENT, "child"),
        ),
        "worker.recycled": Event(
            "info",
            "A worker exceeded `max_rss` or `max_age` (`reason`), and is replaced. Replacements"
            " because of `max_messages` are not logged.",
            (*ASSIGNMENT, "child", "reason", "rss"),
        ),
        "worker.resumed": Event(
            "info",
            "A stalled worker can read and acknowledge messages again.",
            (*ASSIGNMENT, *_DURATION),
        ),
        "worker.retried": Event(
            "info", "The worker of a partition is started again after a crash loop.", ASSIGNMENT
        ),
        "worker.stalled": Event(
            "warning",
            "A worker cannot read or acknowledge messages (`error`). It retries until it can.",
            (*ASSIGNMENT, "error"),
        ),
        "worker.started": Event("info", "A worker was forked.", (*ASSIGNMENT, "child", "epoch")),
        "worker.unkillable": Event(
            "error",
            "A worker was killed but does not exit. Its partition is released.",
            (*ASSIGNMENT, "child"),
        ),
    },
    "Messages and retries": {
        "circuit.closed": Event(
            "info",
            "A message succeeded, so the circuit of the partition closed. The partition continues.",
            ASSIGNMENT,
        ),
        "circuit.opened": Event(
            "warning",
            "The circuit of a partition opened, because a dependency is down: `failures` runs"
            " failed within `breaker.window`, the last with `error`. The partition stops. Every"
            " `breaker.probe_every`, one message runs as a probe.",
            (*ASSIGNMENT, "error", "failures"),
        ),
        "due_time.removed": Event(
            "error",
            "The due times of `members` delayed sends or waiting retries were removed, because"
            " their messages are missing in Redis.",
            ("where", "members"),
        ),
        "entries.reclaimed": Event(
            "info",
            "The worker took over `entries` entries that another client had fetched and not"
            " acknowledged.",
            (*ASSIGNMENT, "entries", "missing_entries"),
        ),
        "message.deferred": Event(
            "warning",
            "Redis rejected the retry or dead letter of failed messages (`error`), usually because"
            " its memory is full. The worker repeats the write, and the messages stay pending.",
            (*ASSIGNMENT, "entries", "error"),
        ),
        "message.expired": Event(
            "info",
            "A message expired before it was handled. It was acknowledged without a run.",
            (*ASSIGNMENT, "uid", "attempt", "suppressed"),
        ),
        "message.retried": Event(
            "info",
            "A message failed. It runs again after `delay` seconds.",
            (*ASSIGNMENT, "uid", "attempt", "delay", "error", "at", *_TRACE, "suppressed"),
        ),
        "missing_entry.acknowledged": Event(
            "warning",
            "A pending entry was acknowledged without a run, because another client had trimmed"
            " it.",
            (*ASSIGNMENT, "place"),
        ),
        "quarantine.lock_failed": Event(
            "warning",
            "The state directory does not support file locks. A suspect message of a lost host may"
            " run at the same time as others.",
            (*ASSIGNMENT, "error"),
        ),
        "reclaim.requested": Event(
            "info",
            "Another client (`consumer_name`) fetched entries and did not acknowledge them for"
            " `reclaim_idle`. The worker takes them over.",
            (*ASSIGNMENT, "consumer_name"),
        ),
        "waiting_message.unreadable": Event(
            "error",
            "`members` delayed sends or waiting retries cannot be read, because another client"
            " wrote them. The housekeeper tries again after a minute.",
            ("where", "members"),
        ),
    },
    "Dead letters": {
        "dead_letter.given_up": Event(
            "warning",
            "A dead-letter consumer failed to handle a dead letter (`error`). The dead letter is"
            " kept.",
            (*_FAILED_MESSAGE, *_TRACE, "suppressed"),
        ),
        "dead_letters.expired": Event(
            "info",
            "`count` dead letters older than `dlq_retention` were deleted.",
            ("topic", "count"),
        ),
        "flood.stopped": Event(
            "error",
            "Too many messages of a partition were dead-lettered (`flood_guard`). The partition is"
            " paused until an operator runs `streamqd resume`. If the pause cannot be stored in"
            " Redis (`error`), it lasts for `flood_guard.window`.",
            (*ASSIGNMENT, "why", "error"),
        ),
        "message.dead_lettered": Event(
            "warning",
            "A message was moved to the dead-letter stream (`reason`). To read it, run"
            " `streamqd dlq show`.",
            (*_FAILED_MESSAGE, *_TRACE, "suppressed"),
        ),
    },
    "Schedules": {
        "schedule.added": Event(
            "info", "A new schedule was added and is active.", ("schedule", "topic")
        ),
        "schedule.changed": Event(
            "info",
            "The specification of a schedule changed. The change takes effect immediately.",
            ("schedule", "topic"),
        ),
        "schedule.misfired": Event(
            "info",
            "`ticks` ticks of a schedule were missed, because no housekeeper was running or the"
            " schedule was not active. The setting `misfire` of the schedule prevents messages for"
            " them.",
            ("schedule", "topic", "ticks"),
        ),
        "schedule.moved": Event(
            "info",
            "A schedule moved to another partition, because its topic grew, or because its topic"
            " or key changed.",
            ("schedule", "topic", "partition"),
        ),
        "schedule.orphaned": Event(
            "warning",
            "No live instance has declared the schedule for 10 minutes, so it sends nothing. It"
            " keeps its due time, and continues when an instance declares it again. To remove it,"
            " run `streamqd schedule prune`.",
            ("schedule", "topic"),
        ),
        "schedule.refused": Event(
            "error",
            "A schedule of the configuration is rejected (`problem`) and sends nothing. Other"
            " schedules are not affected.",
            ("schedule", "problem"),
        ),
        "schedule.unreadable": Event(
            "error",
            "The specification of a schedule in Redis cannot be read (`error`). The schedule sends"
            " nothing until an instance declares it again. To remove it, run `streamqd schedule"
            " remove`.",
            ("schedule", "topic", "error"),
        ),
    },
    "Topics, groups and retention": {
        "group.restored": Event(
            "warning",
            "An expected group was missing, because it was destroyed or the server was emptied. It"
            " was created again at its old position, so no unread message is skipped.",
            (*ASSIGNMENT, "after", "retries_after", "in_flight"),
        ),
        "retention.dropped": Event(
            "warning",
            "`entries` unacknowledged entries (`state`: unread or pending) were removed, because"
            " of `retention.drop_unacked_after` or `retention.drop_unacked_above`.",
            (*ASSIGNMENT, "state", "entries"),
        ),
        "topic.lost": Event(
            "warning",
            "The metadata of a topic is missing in Redis. The daemon registers the topic again.",
            ("topic", "more"),
        ),
        "topic.restored": Event(
            "warning",
            "The daemon registered a topic again, with its previous partitions.",
            ("topic", "partitions"),
        ),
        "topics.refused": Event(
            "warning",
            "Redis rejected the registration of topics and groups (`error`). The daemon retries"
            " every 2 s.",
            ("error",),
        ),
        "topics.restored": Event(
            "info", "The daemon registered topics and groups again.", _DURATION
        ),
        "trim.refused": Event(
            "warning",
            "A stream is not trimmed, because the expected group `group` is missing. Trimming"
            " without it could remove unread messages.",
            ASSIGNMENT,
        ),
    },
    "Directives of operators": {
        "directive.ignored": Event(
            "warning",
            "A directive in Redis cannot be read and has no effect (`problem`). A later version of"
            " streamqd may have written it.",
            ("directive", "problem", "more"),
        ),
        "drain.removed": Event(
            "info",
            "An operator undid the drain of an instance. The instance can own partitions again.",
            ("directive",),
        ),
        "drain.requested": Event(
            "info",
            "An operator drained an instance. The instance releases its partitions.",
            _DIRECTIVE,
        ),
        "group.started": Event(
            "info", "An operator started a stopped group again.", ("directive",)
        ),
        "group.stopped": Event(
            "info", "An operator stopped a group. No instance owns its partitions.", _DIRECTIVE
        ),
        "move.removed": Event(
            "info",
            "The move of a partition was removed. Any instance can own the partition again.",
            ("directive",),
        ),
        "move.requested": Event(
            "info", "An operator moved a partition to another instance (`to`).", _DIRECTIVE
        ),
        "pause.removed": Event("info", "An operator removed a pause.", ("directive",)),
        "pause.requested": Event(
            "info", "An operator paused a topic, a group or a partition.", _DIRECTIVE
        ),
        "rebalance.requested": Event(
            "info", "An operator requested a rebalance of the fleet.", ("by", "why")
        ),
    },
    "Redis": {
        "embedded.exited": Event(
            "error",
            "The embedded server exited unexpectedly (`how`) and is restarted.",
            ("how",),
        ),
        "embedded.failed": Event(
            "error",
            "The embedded server cannot be restarted (`error`). The daemon retries every second.",
            ("error",),
        ),
        "embedded.started": Event("info", "The embedded server answers.", ("child",)),
        "embedded.stopped": Event("info", "The embedded server was stopped with the daemon."),
        "redis.bad_value": Event(
            "warning, error",
            "A value in Redis is not valid for its key. The affected partition, group or topic is"
            " suspended and checked again later. To print the fix, run `streamqd doctor`. At level"
            " `error`, a key of the whole fleet has the wrong type, and all partitions stop until"
            " an operator runs the command in `fix`.",
            ("key", "field", "found", "wanted", "fix", "error", "request", *ASSIGNMENT, "more"),
        ),
        "redis.lost": Event(
            "warning",
            "Redis does not answer (`error`). The daemon retries until it does.",
            ("address", "error"),
        ),
        "redis.recovered": Event("info", "Redis answers again.", ("address", *_DURATION)),
        "redis.refused": Event(
            "error",
            "Redis rejected a command of the supervisor (`error`). The supervisor retries it.",
            ("request", "error", *ASSIGNMENT),
        ),
        "redis.unavailable": Event(
            "warning",
            "Redis does not answer during startup. The daemon retries for `seconds` seconds, and"
            " then exits with code 4.",
            ("seconds", "error"),
        ),
    },
    "Outbox relays": {
        "outbox.acquired": Event(
            "info", "This relay acquired the outbox and sends its rows.", ("outbox", "epoch")
        ),
        "outbox.blocked": Event(
            "warning",
            "`rows` rows of an outbox wait, because of `error`. The relay retries them every"
            " `poll`, and sends other rows.",
            ("outbox", "rows", "error"),
        ),
        "outbox.database_lost": Event(
            "warning",
            "The database of an outbox is unavailable (`error`). The relay reconnects"
            " automatically. No row is lost.",
            ("outbox", "error", "refused"),
        ),
        "outbox.database_recovered": Event(
            "info", "The database of an outbox is available again.", ("outbox", *_DURATION)
        ),
        "outbox.exited": Event(
            "warning",
            "The outbox relay exited unexpectedly (`how`) and is restarted.",
            ("how", "outbox"),
        ),
        "outbox.lost": Event(
            "info",
            "Another relay acquired the outbox. This relay stops sending and is on standby.",
            ("outbox", "epoch"),
        ),
        "outbox.redis_lost": Event(
            "warning",
            "The outbox relay cannot use Redis (`error`). The rows stay in the database.",
            ("outbox", "error"),
        ),
        "outbox.redis_recovered": Event(
            "info", "The outbox relay can use Redis again.", ("outbox", *_DURATION)
        ),
        "outbox.release_failed": Event(
            "warning",
            "A relay stopped, but could not release its outbox. Another relay takes over when the"
            " lease expires.",
            ("outbox", "error"),
        ),
        "outbox.row_dead_lettered": Event(
            "warning",
            "A row of an outbox cannot be sent (`error`). The relay moved it to the dead-letter"
            " table, and sends other rows.",
            ("outbox", "row", "topic", "uid", "error"),
        ),
        "outbox.standby": Event(
            "info",
            "Another relay (`owner`) owns the outbox. This relay takes over when that relay stops.",
            ("outbox", "owner"),
        ),
        "outbox.started": Event("info", "The outbox relay started.", ("outbox", "owner")),
        "outbox.stopped": Event(
            "info", "The outbox relay stopped, after it sent `sent` rows.", ("outbox", "sent")
        ),
        "outbox.unblocked": Event(
            "info",
            "The relay is no longer blocked, and sends the rows of the outbox.",
            ("outbox", *_DURATION),
        ),
    },
    "Housekeeper, HTTP endpoints and console": {
        "console.failed": Event(
            "error",
            "A console page failed with an internal error. Other pages work. Report the traceback.",
            ("path",),
        ),
        "housekeeper.exited": Event(
            "warning",
            "The housekeeper exited unexpectedly (`how`) and is restarted.",
            ("how",),
        ),
        "housekeeper.failed": Event(
            "warning, error",
            "A housekeeping task failed (`error`), as a whole or for one partition. The other"
            " tasks and partitions continue. At level `error`, report the traceback.",
            ("task", "error", *ASSIGNMENT),
        ),
        "housekeeper.recovered": Event(
            "info",
            "A housekeeping task that had failed works again.",
            ("task", *ASSIGNMENT, *_DURATION),
        ),
        "housekeeper.started": Event("info", "The housekeeper started."),
        "housekeeper.stopped": Event(
            "info",
            "The housekeeper stopped after a stop request, or because its supervisor exited.",
        ),
        "http.failed": Event(
            "error",
            "The response of an HTTP endpoint (`path`) could not be generated. Other endpoints"
            " still answer. Report the traceback.",
            ("path", "error"),
        ),
        "http.listening": Event(
            "info",
            "The HTTP endpoints for metrics and health checks are available at `address`.",
            ("address",),
        ),
        "http.unavailable": Event(
            "warning",
            "The HTTP address cannot be bound (`error`). The daemon retries, and continues to"
            " handle messages.",
            ("address", "error"),
        ),
    },
    "Logs, stacks and telemetry": {
        "log.dropped": Event(
            "warning",
            "`lines` log lines were dropped, because the reader of the log was too slow.",
            ("lines", "error"),
        ),
        "process.failed": Event(
            "error",
            "A process or thread of the daemon raised an uncaught exception (`traceback`). If the"
            " thread belongs to a handler, only this thread stops.",
            ("thread", "about"),
        ),
        "stack.dumped": Event(
            "warning",
            "The stack of the process `child` is in `traceback`. The process crashed with a signal"
            " such as SIGSEGV, or the stack was requested with SIGUSR1 or `streamqd stack` (`by`).",
            ("child", "about", "by", *ASSIGNMENT),
        ),
        "state.dumped": Event(
            "info",
            "The state of one partition, logged on SIGUSR1. The stacks follow as `stack.dumped`.",
            (
                *(*ASSIGNMENT, "phase", "epoch", "child", "worker", "in_flight"),
                "last_exit",
            ),
        ),
        "telemetry.failed": Event(
            "warning",
            "Spans or Sentry reports cannot be created or exported, or the spans of killed runs"
            " cannot be stored (`error`). Messages are handled normally. Check the `OTEL_*` and"
            " `SENTRY_*` variables, the collector, and the disk of `daemon.state_dir`.",
            (*ASSIGNMENT, "error"),
        ),
        "telemetry.recovered": Event(
            "info", "The spans of killed runs are exported again.", _DURATION
        ),
        "telemetry.spans_lost": Event(
            "warning",
            "The last spans of a worker are lost, because the collector did not accept them within"
            " 1 s of its exit. No message is affected.",
            ASSIGNMENT,
        ),
    },
}
"""All events, by section of the reference page. Within a section, they are sorted by name."""

EVENTS: dict[str, Event] = {
    name: event for events in SECTIONS.values() for name, event in events.items()
}
"""All events, by name. Logging an event that is missing here is a programming error."""
