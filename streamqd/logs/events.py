"""The registry of log events: a stable name and its meaning for the operator."""

from __future__ import annotations

EVENTS: dict[str, str] = {
    "assignment.given_up": "streamqd failed with an internal error on one partition and group"
    " (`error`, a traceback follows). Its worker was killed, its lease was released, and messages"
    " that were not acknowledged run again. The partition is started again after `seconds`. All"
    " other partitions continue. Report the traceback.",
    "burst.finished": "No messages are left to handle (`--burst`). The daemon exits.",
    "capacity.raised": "The operating system allows this instance to start processes again. The"
    " fleet assigns it as many partitions as it can serve (`partitions`; null: no limit).",
    "capacity.reduced": "The operating system refuses processes (`error`). Partitions were"
    " released, and other instances take them over. Raise the limit of processes, file descriptors"
    " or memory.",
    "circuit.closed": "The circuit of a partition closed, because a message succeeded.",
    "circuit.opened": "A dependency is down (`breaker`). The partition handles no message, except"
    " one as a probe every `probe_every`.",
    "config.warning": "A setting or the server's configuration is valid but not recommended.",
    "console.failed": "A console page failed with an internal error. Other pages work. Report the"
    " traceback.",
    "daemon.ready": "Startup is complete. The daemon handles messages or stands by.",
    "daemon.started": "The daemon started.",
    "dead_letter.given_up": "A dead-letter consumer failed to handle a dead letter, which stays in"
    " the dead-letter stream.",
    "dead_letters.expired": "Dead letters older than dlq_retention were deleted.",
    "directive.ignored": "A directive in Redis cannot be read. A later version may have written"
    " it.",
    "drain.expired": "The drain deadline passed while messages were running. These messages run"
    " again on the next owner.",
    "drain.finished": "All running messages were finished and their partitions released.",
    "drain.removed": "A drain was undone. The instance can own partitions again.",
    "drain.requested": "An operator drains an instance: it releases its partitions.",
    "drain.started": "The daemon stops fetching and finishes running messages.",
    "due_time.removed": "A due time without a stored message was removed.",
    "duplicate_instance.exited": "Another live instance (`other_host`, `other_pid`) has the same"
    " `daemon.instance`. This one exits with code 5. Give it another `daemon.instance` and"
    " `daemon.state_dir`.",
    "embedded.exited": "The embedded server exited and is restarted.",
    "embedded.failed": "The embedded server cannot be restarted. The daemon retries every second.",
    "embedded.started": "The embedded server answers.",
    "embedded.stopped": "The embedded server was stopped with the daemon.",
    "entries.reclaimed": "Entries that another client left pending were taken over.",
    "flood.stopped": "Too many messages of the partition were dead-lettered (`flood_guard`). It"
    " is paused until `streamqd resume`.",
    "fork.failed": "The operating system refuses another process. The daemon retries every second"
    " for 3 s.",
    "fork.recovered": "Processes can be forked again.",
    "group.restored": "An expected group was missing, because it was destroyed or the server was"
    " emptied. It was created again at its old position, so no unread message is skipped.",
    "group.started": "A stopped group was started again.",
    "group.stopped": "An operator stopped a group: no instance owns its partitions.",
    "housekeeper.exited": "The housekeeper exited unexpectedly and is restarted.",
    "housekeeper.failed": "A housekeeping task failed, as a whole or for one partition"
    " (`partition`). The other tasks and partitions continue.",
    "housekeeper.recovered": "A housekeeping task that had failed works again.",
    "housekeeper.started": "The housekeeper started.",
    "housekeeper.stopped": "The housekeeper received a stop request, or lost its supervisor.",
    "http.failed": "An HTTP endpoint could not be generated. Other endpoints still answer.",
    "http.listening": "Metrics and health are served at this address.",
    "http.unavailable": "The HTTP address cannot be bound. The daemon retries, and handles"
    " messages in the meantime.",
    "import.delayed": "The import of the handler modules takes longer than 2 s. No worker starts"
    " before it is complete.",
    "instance.crash_looped": "Every partition of this instance crashes in a loop. The daemon"
    " exits.",
    "instance.duplicated": "Another daemon (`other_host`, `other_pid`) has the same"
    " `daemon.instance`, so this one owns no partition yet. While the other daemon drains, this"
    " one waits. If the other daemon sends two more heartbeats, this one exits with code 5. If it"
    " sends none for `lease_ttl`, this one starts.",
    "instance.frozen": "This instance was suspended or got no CPU time for more than 5 s. No"
    " message is charged.",
    "lease.acquired": "This instance owns the partition.",
    "lease.lost": "Another instance owns the partition, usually because the lease was not renewed"
    " in time. The worker of this instance is stopped.",
    "lease.released": "This instance released the partition.",
    "lease.renewed_late": "The lease had expired and was renewed. Ownership did not change.",
    "lease.resumed": "The partition of a killed supervisor resumes. Finished messages (`done`) are"
    " acknowledged. A message that was running (`running`) is charged if it was the only one.",
    "log.dropped": "Log lines were dropped because their reader was too slow.",
    "loop.blocked": "A coroutine blocks the event loop of its worker for `seconds`: no other"
    " coroutine of the partition continues. `file`, `line` and `function` identify the code."
    " Without them, another of the worker's threads holds the GIL, or the process is stopped."
    " `running` is the number of running messages, and `messages` lists the oldest. The stack of"
    " the loop follows. The event is repeated after twice the time.",
    "loop.resumed": "A blocked event loop runs again, after `seconds`.",
    "message.dead_lettered": "A message was moved to the dead-letter stream.",
    "message.deferred": "Redis rejected the write for a failed message, usually because its memory"
    " is full. The worker retries the write.",
    "message.expired": "A message was past the expiry time set by its producer and was not"
    " handled.",
    "message.retried": "A message failed. It is retried after `delay` seconds.",
    "missing_entry.acknowledged": "A pending entry had been trimmed by another client. It was"
    " acknowledged.",
    "move.removed": "A move was removed: any instance may own the partition again.",
    "move.requested": "An operator moves a partition to another instance.",
    "outbox.acquired": "The relay owns the outbox and sends its rows.",
    "outbox.blocked": "Rows of an outbox wait (`rows`), because of `error`. Other rows are sent."
    " The relay retries the waiting rows every `poll`.",
    "outbox.database_lost": "The outbox database is unavailable (`error`). Its rows wait there."
    " The relay reconnects automatically.",
    "outbox.database_recovered": "The outbox database is available again.",
    "outbox.exited": "The outbox relay exited unexpectedly and is restarted.",
    "outbox.lost": "Another relay owns the outbox. This relay sends nothing and stands by.",
    "outbox.redis_lost": "The outbox relay cannot use Redis (`error`). Its rows wait in the"
    " database.",
    "outbox.redis_recovered": "The outbox relay can use Redis again.",
    "outbox.release_failed": "A relay stopped and could not release its outbox. Another relay"
    " takes over when the lease expires.",
    "outbox.row_dead_lettered": "A row of an outbox cannot be sent (`error`). It was moved"
    " to the dead-letter table. Other rows are sent.",
    "outbox.standby": "Another relay (`owner`) owns the outbox. This relay takes over when the"
    " other one stops.",
    "outbox.started": "The outbox relay started.",
    "outbox.stopped": "The outbox relay stopped.",
    "outbox.unblocked": "The relay is no longer blocked, and sends the rows of the outbox.",
    "partition.handed_over": "A partition moves to another instance, because this instance's share"
    " of the fleet changed.",
    "pause.removed": "A pause was removed.",
    "pause.requested": "An operator paused a topic, a group or a partition.",
    "process.failed": "A process or thread of the daemon raised an uncaught exception"
    " (`traceback`). If it is a thread of a handler, only this thread stops.",
    "quarantine.lock_failed": "The state directory does not support locks. A suspect message of a"
    " lost host may run at the same time as others.",
    "rebalance.requested": "An operator requested a rebalance of the fleet.",
    "reclaim.requested": "Entries read by another client are idle. The worker will reclaim them.",
    "redis.bad_value": "A value in Redis is not valid for its key. The affected partition, group"
    " or topic is suspended and checked again later, and everything else continues. `streamqd"
    " doctor` prints the fix. At level `error`, a fleet-wide key has the wrong type. All"
    " partitions stop until an operator runs the command in `fix`.",
    "redis.lost": "Redis does not answer. The daemon retries until it does.",
    "redis.recovered": "Redis answers again.",
    "redis.refused": "Redis rejected a command of the supervisor, which is retried.",
    "redis.unavailable": "Redis does not answer during startup. The daemon retries for `seconds`,"
    " and then exits with code 4.",
    "reload.edited": "`--reload` detected a saved file. A reload starts.",
    "reload.finished": "All workers run the new configuration and code.",
    "reload.refused": "The new configuration or code is not valid. Nothing was changed.",
    "reload.requested": "An operator requested a reload, and it is this instance's turn.",
    "reload.restart_required": "These changed settings take effect only after a restart.",
    "reload.started": "A reload was requested. The new configuration and code are being checked.",
    "reload.stopped": "A replacement worker did not start, so the reload stopped. Workers that"
    " were not replaced yet keep the old code.",
    "reload.validated": "The new configuration is valid. Workers are replaced one by one.",
    "request.fenced": "A newer owner exists. The request of this process was rejected and changed"
    " nothing.",
    "retention.dropped": "Unacknowledged entries were dropped, because of"
    " retention.drop_unacked_*.",
    "schedule.added": "A new schedule was added and is active.",
    "schedule.changed": "The specification of a schedule changed and takes effect now.",
    "schedule.misfired": "Ticks of a schedule (`ticks`) were missed, because no housekeeper was"
    " running or the schedule was not active. They are skipped, because of `misfire`.",
    "schedule.moved": "A schedule moved to another partition, because its topic has grown, or its"
    " topic or key has changed.",
    "schedule.orphaned": "No live instance has declared the schedule for 10 minutes. It stops and"
    " keeps its due time. It continues when an instance declares it again. `streamqd schedule"
    " prune` removes it.",
    "schedule.refused": "A schedule of the configuration is rejected (`problem`) and not sent."
    " The others are not affected.",
    "schedule.unreadable": "The specification of a schedule in Redis cannot be read (`error`). It"
    " is suspended until an instance declares it again. `streamqd schedule remove` removes it.",
    "scoreboard.found": "The scoreboard file of a killed supervisor was read. It lists the"
    " messages that its workers finished.",
    "scoreboard.private": "The scoreboard is not stored in a file. If the supervisor is killed,"
    " messages that its workers finished just before are handled again.",
    "scoreboard.refused": "The scoreboard file of a killed supervisor, or a partition in it, is"
    " damaged or belongs to another instance. It was ignored, so messages that were in flight"
    " may be handled again. A damaged file is renamed. Delete it once you know the cause.",
    "signal.received": "The daemon received a signal.",
    "stack.dumped": "A process crashed with a signal such as SIGSEGV (`child`), or its stack was"
    " requested by SIGUSR1 or `streamqd stack` (`by`). `traceback` contains the stack.",
    "standby.failed": "A replacement worker crashed while it booted. The current worker continues.",
    "standby.given_up": "A replacement worker cannot start for now. The current worker continues.",
    "standby.ready": "A standby has booted. It takes over as soon as the current worker releases"
    " the partition.",
    "standby.started": "A worker boots next to the worker that it will replace.",
    "start.refused": "The daemon did not start and exits with `code`. Each problem has one line.",
    "state.dumped": "One line per partition, logged on SIGUSR1. The stacks follow as"
    " `stack.dumped`.",
    "telemetry.failed": "Spans or Sentry reports cannot be created or exported, or the spans of"
    " killed runs cannot be kept. Messages are handled normally. Check the OTEL_* and SENTRY_*"
    " variables, the collector, and the disk of daemon.state_dir.",
    "telemetry.recovered": "Spans of killed runs are exported again.",
    "telemetry.spans_lost": "The collector did not accept a worker's last spans within 1 s of its"
    " exit. They are lost. No message is affected.",
    "topic.lost": "The metadata of a topic is missing in Redis. The topic is registered again.",
    "topic.restored": "A topic was registered again, with the partitions that it had.",
    "topics.refused": "Redis rejected the registration of topics and groups. The daemon retries"
    " every 2 s.",
    "topics.restored": "Topics and groups are registered again.",
    "trim.refused": "A stream is not trimmed, because an expected group is missing on it.",
    "waiting_message.unreadable": "A delayed send or waiting retry is not in streamqd's format."
    " The housekeeper tries again after a minute.",
    "worker.boot_failed": "A worker exited before it was ready.",
    "worker.charged": "A message was running when its worker crashed. The crash is counted against"
    " the message.",
    "worker.crash_looped": "The worker of a partition crashed repeatedly (`crash_loop`). Another"
    " instance takes the partition, or the worker is started again after `crash_cooldown`.",
    "worker.crashed": "A worker crashed.",
    "worker.exited": "A worker exited as requested.",
    "worker.forked": "A child process that a handler forked returned instead of exiting. It was"
    " stopped.",
    "worker.handed_over": "A worker that booted next to its predecessor has taken over.",
    "worker.hook_failed": "`on_stop` raised an exception. The worker exits anyway.",
    "worker.killed": "A worker was killed, because a run, `on_stop` or the drain exceeded its"
    " time limit.",
    "worker.limit_exceeded": "A worker exceeded max_rss with its first message. Raise the limit.",
    "worker.ready": "A worker has loaded its handler and fetches messages.",
    "worker.recycled": "A worker reached a limit and is replaced.",
    "worker.resumed": "A stalled worker reads again.",
    "worker.retried": "The worker of a partition is started again after a crash loop.",
    "worker.stalled": "A worker cannot read or acknowledge. It retries until it can.",
    "worker.started": "A worker was forked.",
    "worker.unkillable": "A killed worker does not exit. Its partition is released.",
}
"""Every event and its meaning. An event that is missing here is a programming error."""
