"""The registry of log events: a stable word, and what it tells the operator."""

from __future__ import annotations

EVENTS: dict[str, str] = {
    "assignment.given_up": "streamqd failed at one partition and group (`error`, a traceback"
    " follows). Its worker was killed and its lease given back; what was not acknowledged runs"
    " again. It is tried again after `seconds`; all others continue. Report the traceback.",
    "burst.settled": "Everything is settled and --burst was given; the daemon ends.",
    "capacity.raised": "The system lets this instance start processes again: the fleet gives it as"
    " many partitions as it can serve (`partitions`; none is no limit).",
    "capacity.reduced": "The system refuses processes (`error`): partitions were given up, and the"
    " fleet knows how many this instance can serve.",
    "circuit.closed": "The circuit of a partition closed, because a message succeeded.",
    "circuit.opened": "A dependency is down (`breaker`): one message at a time is tried.",
    "config.warning": "A setting, or the server's configuration, is allowed but unwise.",
    "crash_loop": "Every partition of this instance crashes in a loop; the daemon gives up.",
    "drain.begun": "The daemon stops fetching and finishes what is running.",
    "drain.deadline": "Work was still running when the drain time was over; it was released.",
    "drained": "Everything that was running has been finished and released.",
    "embedded.exited": "The embedded server ended; it is started again.",
    "embedded.failed": "The embedded server cannot be started again; it is tried every second.",
    "embedded.started": "The embedded server answers.",
    "embedded.stopped": "The embedded server was stopped with the daemon.",
    "fenced": "A newer owner exists; what this process asked for was refused and changed nothing.",
    "flood.stopped": "Most messages of the partition die; it is paused until somebody resumes it.",
    "fork.back": "Processes can be forked again.",
    "fork.failed": "The system refuses another process; it is tried every second for 3 s.",
    "frozen": "This instance stood still for a while; no run is blamed for it.",
    "group.restored": "A group was missing where it is expected (destroyed, or the server was"
    " emptied); it was made again, so that nothing unread is skipped. Its owner lets it go on"
    " where it was.",
    "housekeeper.exited": "The housekeeper ended unexpectedly; it is started again.",
    "housekeeper.failed": "One housekeeping task failed, or failed at one partition (`partition`);"
    " the others continue.",
    "housekeeper.recovered": "A housekeeping task that had failed works again.",
    "housekeeper.started": "The housekeeper runs.",
    "housekeeper.stopped": "The housekeeper was told to stop, or lost its supervisor.",
    "http.failed": "A page could not be made; the others are served.",
    "http.listening": "Metrics and health are served at this address.",
    "http.unavailable": "The HTTP address cannot be bound; it is tried again, work goes on.",
    "import.slow": "Importing the handler modules takes longer than 2 s; nothing starts before it"
    " is complete.",
    "instance.duplicated": "Another run (`other_host`, `other_pid`) has the same `daemon.instance`,"
    " so this one owns nothing yet. It starts when that run's last heartbeat is older than"
    " `lease_ttl`, waits while that run drains, and exits with code 5 after two more heartbeats.",
    "lease.acquired": "This instance owns the partition.",
    "lease.late": "The lease had expired and was renewed; ownership did not change.",
    "lease.lost": "The partition has another owner; its worker is stopped.",
    "lease.released": "The partition was given up.",
    "lease.resumed": "The partition of a killed supervisor goes on: what had ended (`done`) is"
    " acknowledged; a message that was running (`running`) is charged if it was the only one.",
    "letter.given_up": "The consumer of a dead letter gave it up; it stays a dead letter.",
    "letters.expired": "Dead letters older than dlq_retention were deleted.",
    "log.dropped": "Lines were dropped because nobody read them.",
    "loop.blocked": "A coroutine blocks the event loop of its worker for `seconds`: no other"
    " coroutine of the partition continues. `file`, `line` and `function` name the code; without"
    " them another thread of the worker holds the interpreter, or the process is stopped. `running`"
    " messages run, the oldest are `messages`; the stack of the loop follows. The event is repeated"
    " after twice the time.",
    "loop.resumed": "An event loop that was blocked turns again, after `seconds`.",
    "message.dead": "A message was moved to the dead-letter stream.",
    "message.expired": "A message was past the time that its producer gave it; it was not handled.",
    "message.ghost": "A pending entry had been trimmed by someone else; it was acknowledged.",
    "message.parked": "Redis refuses what a failed message needs; it is tried again.",
    "message.retry": "A message failed and will be tried again.",
    "process.failed": "An exception that no code caught, in a process or thread of the daemon. The"
    " traceback names its place; a thread of a handler ends, everything else continues.",
    "promote.orphan": "A due time had no message stored with it; it was removed.",
    "promote.unreadable": "What was to be moved is not in our form; it waits another minute.",
    "ready": "Everything is in place; the daemon works or stands by.",
    "rebalance.shed": "A partition is handed over because the fleet's shares changed.",
    "reclaim": "Entries that a foreign consumer left pending were taken over.",
    "reclaim.requested": "Entries read by a foreign consumer lie idle; the worker will claim them.",
    "redis.back": "Redis answers again.",
    "redis.bad_value": "Somebody has written a value into Redis that does not belong there. What it"
    " is for is set aside and looked at again; all else goes on. `streamqd doctor` has the cure. At"
    " the level `error`, a key of the whole fleet has another type. No instance owns anything until"
    " the command in `fix` is run.",
    "redis.lost": "Redis does not answer; it is tried again until it does.",
    "redis.refused": "Redis refused a command of the supervisor; it is tried again.",
    "redis.unavailable": "Redis does not answer at the start. It is tried again for `seconds`; then"
    " the daemon exits with code 4.",
    "reload.begun": "A reload was asked for; the new configuration and code are being checked.",
    "reload.done": "All workers run the new configuration and code.",
    "reload.edited": "A file was saved, as --reload looks for; a reload begins.",
    "reload.needs_restart": "These settings have changed but take effect at the next start only.",
    "reload.refused": "The new configuration or code is bad; nothing was changed.",
    "reload.rolling": "The new configuration is valid; workers are replaced one by one.",
    "reload.stopped": "A new worker does not start; what was not replaced yet keeps the old code.",
    "retention.dropped": "Unacknowledged entries were dropped, as retention.drop_unacked_* asks.",
    "schedule.added": "A schedule is new; it fires from now on.",
    "schedule.changed": "A schedule has another specification; it fires from now on by that.",
    "schedule.misfired": "Ticks of a schedule (`ticks`) were missed, because no housekeeper was"
    " there or the schedule was held. They are left out, as its `misfire` says.",
    "schedule.moved": "A schedule went to another partition: its topic has grown, or its topic or"
    " key is another one.",
    "schedule.orphaned": "No live instance has declared the schedule for 10 minutes; it stops, and"
    " keeps its due time. It goes on when an instance declares it again; `streamqd schedule prune`"
    " removes it.",
    "schedule.refused": "A schedule of the file cannot be kept (`problem`). It does not fire; the"
    " others do.",
    "schedule.unreadable": "The specification of a schedule in Redis cannot be read (`error`). It"
    " is held until an instance declares it again; `streamqd schedule remove` removes it.",
    "scoreboard.found": "The file of a killed supervisor was read; it says what its workers did.",
    "scoreboard.private": "The scoreboard has no file in memory: should the supervisor be killed,"
    " what its workers had finished in the last moments is handled again.",
    "scoreboard.refused": "The file of a killed supervisor, or a partition in it, is torn or"
    " foreign. It was ignored: messages that were in flight may be handled again. A file is"
    " renamed; delete it when the cause is clear.",
    "signal": "A signal arrived.",
    "solo.unlocked": "The state directory takes no locks; a suspect of a lost host is not alone.",
    "stack.dumped": "A fatal signal such as SIGSEGV stopped a process (`child`), or SIGUSR1 asked"
    " for its stack, which is the field `traceback`.",
    "start": "The daemon starts.",
    "start.refused": "The daemon did not start and exits with `code`; one line per problem.",
    "state": "One line per partition, logged on SIGUSR1; the stacks follow as `stack.dumped`.",
    "steer.drain": "An operator wants an instance to own nothing.",
    "steer.ignored": "An order in Redis cannot be read; perhaps it is of a later version.",
    "steer.move": "An operator wants a partition on another instance.",
    "steer.pause": "An operator has paused a topic, a group or a partition.",
    "steer.rebalance": "An operator wants the fleet levelled now.",
    "steer.reload": "An operator has ordered a reload, and it is this instance's turn.",
    "steer.resume": "A pause was ended.",
    "steer.start": "A stopped group may be owned again.",
    "steer.stop": "An operator has stopped a group: no instance owns a partition of it.",
    "steer.undrain": "An instance may own partitions again.",
    "steer.unmove": "A partition may be anywhere again.",
    "topic.lost": "A topic has no entry in Redis any more; it gets one again.",
    "topic.restored": "A topic was written to Redis again, with the partitions that it had.",
    "topics.refused": "Topics and groups cannot be registered again; it is tried every 2 s.",
    "topics.restored": "Topics and groups are registered again.",
    "trim.refused": "A stream is not trimmed: an expected group is missing on it.",
    "twin": "Another live instance (`other_host`, `other_pid`) has the same `daemon.instance`. This"
    " one exits with code 5; give it a name and a `daemon.state_dir` of its own.",
    "worker.boot_failed": "A worker ended before it was ready.",
    "worker.charged": "A message was running when its worker died; the crash is counted to it.",
    "worker.crash_loop": "The processes of a partition crashed too often in a row; it rests.",
    "worker.crashed": "A worker died.",
    "worker.exited": "A worker ended as it was told to.",
    "worker.forked": "A child that a handler has forked came back into the worker's loop; it ends.",
    "worker.handover": "A worker that had booted beside the one before it has taken over.",
    "worker.hook_failed": "An on_stop hook raised; the worker ends all the same.",
    "worker.killed": "A worker was killed: its time limit, on_stop or the drain took too long.",
    "worker.ready": "A worker has loaded its handler and fetches.",
    "worker.recycled": "A worker reached a limit and is replaced.",
    "worker.resumed": "A worker that was stalled reads again.",
    "worker.stalled": "A worker cannot read, or not acknowledge; it tries again until it can.",
    "worker.standby": "A worker boots beside the one that it will replace.",
    "worker.standby_failed": "A worker that was to replace another died first; that one goes on.",
    "worker.standby_given_up": "No replacement can start for now; the present worker goes on.",
    "worker.started": "A worker was forked.",
    "worker.tight_limit": "A worker reached max_rss with its first message; raise the limit.",
    "worker.tried_again": "A partition that rested after crashing in a loop is tried again.",
    "worker.undead": "A killed worker does not die; its partition is given up.",
    "worker.warm": "A standby has booted; it takes over as soon as the present worker lets go.",
}
"""Every event and what it means. An event that is not here is a programming error."""
