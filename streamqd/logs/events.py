"""The registry of log events: a stable name and its meaning for the operator."""

from __future__ import annotations

EVENTS: dict[str, str] = {
    "assignment.given_up": "An internal error of streamqd (`error`) affected one partition and"
    " group. A traceback follows: please report it. The worker was killed, the lease was"
    " released, and messages that were not acknowledged run again. The partition is started"
    " again after `seconds`. All other partitions continue.",
    "burst.finished": "With `--burst`, no messages are left to handle. The daemon exits.",
    "capacity.raised": "The operating system allows this instance to start processes again. The"
    " fleet assigns up to `partitions` partitions to it (null means no limit).",
    "capacity.reduced": "The operating system refuses to start more processes (`error`)."
    " Partitions were released, and other instances take them over. Raise the limit of"
    " processes, file descriptors or memory.",
    "circuit.closed": "The circuit of a partition closed, because a message succeeded. The"
    " partition continues.",
    "circuit.opened": "A dependency is down (`breaker`), so the partition stops. Every"
    " `probe_every`, one message runs as a probe.",
    "config.warning": "A setting, or a setting of the Redis server, is valid but not recommended."
    " `about` contains the reason.",
    "console.failed": "A console page failed with an internal error. Other pages work. Report the"
    " traceback.",
    "daemon.ready": "Startup is complete. The daemon handles messages, or waits for partitions.",
    "daemon.started": "The daemon started.",
    "dead_letter.given_up": "A dead-letter consumer failed to handle a dead letter. The dead"
    " letter is kept.",
    "dead_letters.expired": "Dead letters older than `dlq_retention` were deleted.",
    "directive.ignored": "A directive in Redis cannot be read and has no effect. A later version"
    " of streamqd may have written it.",
    "drain.expired": "`drain_timeout` passed while messages were running. These messages run again"
    " on the next owner.",
    "drain.finished": "All running messages are finished, and all partitions are released.",
    "drain.removed": "An operator undid a drain. The instance can own partitions again.",
    "drain.requested": "An operator drained an instance. It releases its partitions.",
    "drain.started": "The daemon stops fetching and finishes running messages.",
    "due_time.removed": "Due times of delayed sends or waiting retries (`members`) were removed,"
    " because their messages are missing in Redis.",
    "duplicate_instance.exited": "Another live instance (`other_host`, `other_pid`) has the same"
    " `daemon.instance`. This instance exits with code 5. Give it another `daemon.instance`"
    " and `daemon.state_dir`.",
    "embedded.exited": "The embedded server exited and is restarted.",
    "embedded.failed": "The embedded server cannot be restarted. The daemon retries every second.",
    "embedded.started": "The embedded server answers.",
    "embedded.stopped": "The embedded server was stopped with the daemon.",
    "entries.reclaimed": "The worker took over entries that another client had fetched and not"
    " acknowledged.",
    "flood.stopped": "Too many messages of a partition were dead-lettered (`flood_guard`). The"
    " partition is paused until an operator runs `streamqd resume`.",
    "fork.failed": "The operating system refuses to start another process. The daemon retries"
    " every second for 3 s.",
    "fork.recovered": "The operating system starts processes again.",
    "group.restored": "An expected group was missing, because it was destroyed or the server was"
    " emptied. It was created again at its old position, so no unread message is skipped.",
    "group.started": "An operator started a stopped group again.",
    "group.stopped": "An operator stopped a group. No instance owns its partitions.",
    "housekeeper.exited": "The housekeeper exited unexpectedly and is restarted.",
    "housekeeper.failed": "A housekeeping task failed, as a whole or for one partition"
    " (`partition`). The other tasks and partitions continue.",
    "housekeeper.recovered": "A housekeeping task that had failed works again.",
    "housekeeper.started": "The housekeeper started.",
    "housekeeper.stopped": "The housekeeper received a stop request, or lost its supervisor.",
    "http.failed": "The response of an HTTP endpoint could not be generated. Other endpoints still"
    " answer.",
    "http.listening": "The HTTP endpoints for metrics and health checks are available at this"
    " address.",
    "http.unavailable": "The HTTP address cannot be bound. The daemon retries, and continues to"
    " handle messages.",
    "import.delayed": "The import of the handler modules takes longer than 2 s. Workers start"
    " after it.",
    "instance.crash_looped": "Every partition of this instance crashes in a loop. The daemon exits"
    " with code 7.",
    "instance.duplicated": "Another daemon (`other_host`, `other_pid`) has the same"
    " `daemon.instance`, so this daemon owns no partition yet. While the other daemon drains,"
    " this daemon waits. Otherwise, this daemon exits with code 5 after two more heartbeats of"
    " the other daemon. If the other daemon sends no heartbeat for `lease_ttl`, this daemon"
    " starts.",
    "instance.frozen": "This instance was suspended or got no CPU time for more than 5 s. No crash"
    " is counted against a message.",
    "lease.acquired": "This instance acquired the partition.",
    "lease.lost": "Another instance acquired the partition, usually because the lease was not"
    " renewed in time. The worker of this instance is stopped.",
    "lease.released": "This instance released the partition.",
    "lease.renewed_late": "The lease had expired and was renewed. Ownership did not change.",
    "lease.resumed": "This instance continues with a partition of a killed supervisor. Finished"
    " messages (`done`) are acknowledged. If only one message was running (`running`), a crash"
    " is counted against it.",
    "log.dropped": "Log lines were dropped, because the reader of the log was too slow.",
    "loop.blocked": "A coroutine has blocked the event loop of its worker for `seconds`. No other"
    " coroutine of the partition continues. `file`, `line` and `function` identify the code."
    " Without them, another thread of the worker holds the GIL, or the process is stopped."
    " `running` is the number of running messages, and `messages` lists the oldest. The stack"
    " of the loop follows. While the loop stays blocked, the event is repeated at twice the"
    " interval each time.",
    "loop.resumed": "An event loop that was blocked for `seconds` runs again.",
    "message.dead_lettered": "A message was moved to the dead-letter stream.",
    "message.deferred": "Redis rejected the retry or dead letter of a failed message, usually"
    " because its memory is full. The worker repeats the write.",
    "message.expired": "A message expired before it was handled, and was acknowledged without a"
    " run.",
    "message.retried": "A message failed. It runs again after `delay` seconds.",
    "missing_entry.acknowledged": "A pending entry was acknowledged without a run, because another"
    " client had trimmed it.",
    "move.removed": "A move was removed. Any instance can own the partition again.",
    "move.requested": "An operator moved a partition to another instance.",
    "outbox.acquired": "This relay acquired the outbox and sends its rows.",
    "outbox.blocked": "Rows of an outbox wait (`rows`), because of `error`. The relay retries them"
    " every `poll`, and sends other rows.",
    "outbox.database_lost": "The database of an outbox is unavailable (`error`). The relay"
    " reconnects automatically. No row is lost.",
    "outbox.database_recovered": "The database of an outbox is available again.",
    "outbox.exited": "The outbox relay exited unexpectedly and is restarted.",
    "outbox.lost": "Another relay acquired the outbox. This relay stops sending and is on standby.",
    "outbox.redis_lost": "The outbox relay cannot use Redis (`error`). The rows stay in the"
    " database.",
    "outbox.redis_recovered": "The outbox relay can use Redis again.",
    "outbox.release_failed": "A relay stopped, but could not release its outbox. Another relay"
    " takes over when the lease expires.",
    "outbox.row_dead_lettered": "A row of an outbox cannot be sent (`error`). The relay moved it"
    " to the dead-letter table, and sends other rows.",
    "outbox.standby": "Another relay (`owner`) owns the outbox. This relay takes over when that"
    " relay stops.",
    "outbox.started": "The outbox relay started.",
    "outbox.stopped": "The outbox relay stopped.",
    "outbox.unblocked": "The relay is no longer blocked, and sends the rows of the outbox.",
    "partition.handed_over": "A partition moves to another instance, because the partitions of the"
    " fleet were rebalanced.",
    "pause.removed": "An operator removed a pause.",
    "pause.requested": "An operator paused a topic, a group or a partition.",
    "process.failed": "A process or thread of the daemon raised an uncaught exception"
    " (`traceback`). If the thread belongs to a handler, only this thread stops.",
    "quarantine.lock_failed": "The state directory does not support file locks. A suspect message"
    " of a lost host may run at the same time as others.",
    "rebalance.requested": "An operator requested a rebalance of the fleet.",
    "reclaim.requested": "Another client fetched entries and did not acknowledge them for"
    " `reclaim_idle`. The worker takes them over.",
    "redis.bad_value": "A value in Redis is not valid for its key. The affected partition, group"
    " or topic is suspended and checked again later. Everything else continues. `streamqd"
    " doctor` prints the fix. At level `error`, a key of the whole fleet has the wrong type,"
    " and all partitions stop until an operator runs the command in `fix`.",
    "redis.lost": "Redis does not answer. The daemon retries until it does.",
    "redis.recovered": "Redis answers again.",
    "redis.refused": "Redis rejected a command of the supervisor. The supervisor retries it.",
    "redis.unavailable": "Redis does not answer during startup. The daemon retries for `seconds`,"
    " and then exits with code 4.",
    "reload.edited": "`--reload` detected a saved file. A reload starts.",
    "reload.finished": "All workers run the new configuration and code.",
    "reload.refused": "The new configuration or code is not valid. The old configuration and code"
    " stay in effect.",
    "reload.requested": "An operator requested a reload. This instance starts it now.",
    "reload.restart_required": "Changes to the listed settings take effect only after a restart.",
    "reload.started": "A reload was requested. The new configuration and code are being checked.",
    "reload.stopped": "A replacement worker did not start, so the reload stopped. Workers that"
    " were not replaced keep the old code.",
    "reload.validated": "The new configuration and code are valid. Workers are replaced one by"
    " one.",
    "request.fenced": "Redis rejected a request of this process, because a newer owner exists."
    " Nothing was changed.",
    "retention.dropped": "Unacknowledged entries were removed, because of"
    " `retention.drop_unacked_after` or `retention.drop_unacked_above`.",
    "schedule.added": "A new schedule was added and is active.",
    "schedule.changed": "The specification of a schedule changed and takes effect immediately.",
    "schedule.misfired": "Ticks of a schedule (`ticks`) were missed, because no housekeeper was"
    " running or the schedule was not active. Because of `misfire`, no message is sent for"
    " them.",
    "schedule.moved": "A schedule moved to another partition, because its topic grew, or because"
    " its topic or key changed.",
    "schedule.orphaned": "No live instance has declared the schedule for 10 minutes, so it sends"
    " nothing. It keeps its due time, and continues when an instance declares it again. To"
    " remove it, run `streamqd schedule prune`.",
    "schedule.refused": "A schedule of the configuration is rejected (`problem`) and sends"
    " nothing. Other schedules are not affected.",
    "schedule.unreadable": "The specification of a schedule in Redis cannot be read (`error`). The"
    " schedule sends nothing until an instance declares it again. To remove it, run `streamqd"
    " schedule remove`.",
    "scoreboard.found": "The scoreboard file of a killed supervisor was read. It lists the"
    " messages that its workers finished.",
    "scoreboard.private": "The scoreboard is not stored in a file. If the supervisor is killed,"
    " messages that its workers finished but did not yet acknowledge run again.",
    "scoreboard.refused": "The scoreboard file of a killed supervisor, or the part of one"
    " partition, is damaged or belongs to another instance. It was ignored, so messages that"
    " were in flight may be handled again. A damaged file is renamed. Delete it when you know"
    " the cause.",
    "signal.received": "The daemon received a signal.",
    "stack.dumped": "The stack of a process is in `traceback`. Either the process crashed with a"
    " signal such as SIGSEGV (`child`), or SIGUSR1 or `streamqd stack` requested the stack"
    " (`by`).",
    "standby.failed": "A replacement worker crashed while it booted. The current worker continues.",
    "standby.given_up": "Replacement workers fail to start, so the replacement is postponed. The"
    " current worker continues.",
    "standby.ready": "A replacement worker has booted. It takes over when the current worker"
    " releases the partition.",
    "standby.started": "A replacement worker boots while the current worker continues.",
    "start.refused": "The daemon cannot start, and exits with `code`. Each problem has one line.",
    "state.dumped": "The state of one partition, logged on SIGUSR1. The stacks follow as"
    " `stack.dumped`.",
    "telemetry.failed": "Spans or Sentry reports cannot be created or exported, or the spans of"
    " killed runs cannot be stored. Messages are handled normally. Check the OTEL_* and"
    " SENTRY_* variables, the collector, and the disk of `daemon.state_dir`.",
    "telemetry.recovered": "The spans of killed runs are exported again.",
    "telemetry.spans_lost": "The last spans of a worker are lost, because the collector did not"
    " accept them within 1 s of its exit. No message is affected.",
    "topic.lost": "The metadata of a topic is missing in Redis. The daemon registers the topic"
    " again.",
    "topic.restored": "The daemon registered a topic again, with its previous partitions.",
    "topics.refused": "Redis rejected the registration of topics and groups. The daemon retries"
    " every 2 s.",
    "topics.restored": "The daemon registered topics and groups again.",
    "trim.refused": "A stream is not trimmed, because an expected group is missing on it. Trimming"
    " without it could remove unread messages.",
    "waiting_message.unreadable": "A delayed send or waiting retry (`members`) cannot be read,"
    " because another client wrote it. The housekeeper tries again after a minute.",
    "worker.boot_failed": "A worker exited before it was ready.",
    "worker.charged": "A message was running when its worker crashed. The crash is counted against"
    " the message.",
    "worker.crash_looped": "The worker of a partition crashed repeatedly (`crash_loop`). Another"
    " instance takes over the partition, or the worker is started again after"
    " `crash_cooldown`.",
    "worker.crashed": "A worker crashed.",
    "worker.exited": "A worker exited as requested.",
    "worker.forked": "A process that a handler forked returned from the handler instead of"
    " exiting. The process was stopped.",
    "worker.handed_over": "A replacement worker took over from its predecessor.",
    "worker.hook_failed": "The `on_stop` hook raised an exception. The worker exits anyway.",
    "worker.killed": "A worker was killed, because a run, `on_stop` or the drain exceeded its time"
    " limit.",
    "worker.limit_exceeded": "A worker exceeded `max_rss` with its first message. Raise `max_rss`.",
    "worker.ready": "A worker loaded its handler and fetches messages.",
    "worker.recycled": "A worker reached `max_messages`, `max_rss` or `max_age`, and is replaced.",
    "worker.resumed": "A stalled worker can read and acknowledge again.",
    "worker.retried": "The worker of a partition is started again after a crash loop.",
    "worker.stalled": "A worker cannot read or acknowledge. It retries until it can.",
    "worker.started": "A worker was forked.",
    "worker.unkillable": "A worker was killed but does not exit. Its partition is released.",
}
"""Every event and its meaning. An event that is missing here is a programming error."""
