"""The mistakes, and the tests that must detect them.

T and Q numbers are the traps and questions of the protocol. If no test
detects a mistake, the tests promise more than they check: fix the tests, not this list.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

_FENCE = ("if refusal then", "if false then")

# --- the fence: a former owner changes nothing ----------------------------------------------------

FENCE = (
    mutant(
        "an acknowledgment without the fence",
        "a superseded token changes nothing",
        "lua/settle_ack.lua",
        _FENCE,
        tests={"contract/test_settle_ack.py": "test_settle_ack_refuses_another_token"},
    ),
    mutant(
        "a retry without the fence",
        "a superseded token changes nothing",
        "lua/settle_retry.lua",
        _FENCE,
        tests={"contract/test_settle_retry.py": "test_settle_retry_refuses_another_token"},
    ),
    mutant(
        "a dead letter without the fence",
        "a superseded token changes nothing",
        "lua/settle_dead.lua",
        _FENCE,
        tests={"contract/test_settle_dead.py": "test_settle_dead_refuses_another_token"},
    ),
    mutant(
        "a recovery without the fence",
        "a superseded token gets no entries and opens no session",
        "lua/message_recover.lua",
        _FENCE,
        tests={
            "contract/test_message_recover.py": "test_message_recover_refuses_a_superseded_token"
        },
    ),
    mutant(
        "a reclaim without the fence",
        "a superseded token takes over nothing",
        "lua/message_reclaim.lua",
        _FENCE,
        tests={"contract/test_message_reclaim.py": "test_message_reclaim_refuses_another_token"},
    ),
    mutant(
        "a read that does not watch the fence",
        "no entry is delivered to a worker that has lost the assignment",
        "streamqd/store/fetch.py",
        ('_pack("WATCH", fence)', '_pack("TYPE", fence)'),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_read_after_a_fence_change_fetches_and_acks_nothing"
            )
        },
    ),
    mutant(
        "a worker that continues although the fence has another token",
        "no entry is delivered to a worker that has lost the assignment",
        "streamqd/worker/reader.py",
        ("if not fetched.owned:", "if fetched.owned is None:"),
        tests={
            "integration/test_mutant_gaps.py": ("test_worker_without_the_assignment_starts_nothing")
        },
    ),
)

# --- lost replies and late packets ----------------------------------------------------------------

LOST_AND_LATE = (
    mutant(
        "a new connection that does not list pending entries",
        "entries that a lost read delivered are handled (T1)",
        "streamqd/worker/worker.py",
        (
            "                self._attach()\n                self._serve()",
            (
                "                if self.link.node.opened:\n"
                "                    self.reader.watch()\n"
                "                else:\n"
                "                    self._attach()\n"
                "                self._serve()"
            ),
        ),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_entries_of_a_lost_read_are_handled_after_reconnect"
            )
        },
    ),
    mutant(
        "a recovery that opens no session",
        "a read that executes after the listing delivers nothing (T1)",
        "lua/message_recover.lua",
        ("if open == '1' then", "if open == 'never' then"),
        tests={
            "contract/test_message_recover.py": [
                "test_message_recover_opens_a_session",
                "test_message_recover_lists_or_refuses_an_earlier_fetch",
            ]
        },
    ),
    mutant(
        "an acquire that does not compare epochs",
        "a late acquire does not put an old token back (T2)",
        "lua/lease_acquire.lua",
        ("if not mine and epoch ~= tonumber(seen_epoch) then", "if false then"),
        tests={
            "contract/test_traps.py": "test_late_acquire_does_not_restore_an_old_token",
            "contract/test_lease_acquire.py": ("test_lease_acquire_refuses_an_outdated_epoch"),
        },
    ),
    mutant(
        "a renewal that gives up an expired lease",
        "a server pause longer than the lease TTL costs no ownership",
        "lua/lease_renew.lua",
        (
            "redis.call('SET', lease, token, 'PX', ttl_ms)\nreturn {'LATE'}",
            "return {'LOST'}",
        ),
        tests={
            "contract/test_lease_renew.py": (
                "test_lease_renew_restores_an_expired_lease_with_its_epoch"
            )
        },
    ),
    mutant(
        "a token that is reused after its release",
        "a late release does not free the assignment under its next owner (T13)",
        "streamqd/supervisor/partition.py",
        (
            "Lease(self.assignment, secrets.token_hex(16), seen_epoch)",
            "Lease(self.assignment, self.lease.token or secrets.token_hex(16), seen_epoch)",
        ),
        (
            "self.step = Free()\n        self._drop_token()\n        self.slot",
            "self.step = Free()\n        self.slot",
        ),
        tests={"unit/test_partition_state.py": "test_every_acquire_has_a_new_token"},
    ),
    mutant(
        "a release without the fence",
        "a late release does not free the assignment under its next owner (T13)",
        "lua/lease_release.lua",
        _FENCE,
        tests={
            "contract/test_traps.py": (
                "test_late_release_does_not_free_the_next_owners_assignment"
            ),
            "contract/test_lease_release.py": "test_lease_release_leaves_another_owner_alone",
        },
    ),
)

# --- a process dies -------------------------------------------------------------------------------

DEATH = (
    mutant(
        "a death after which only the running entry counts",
        "finished messages are acknowledged, not run again (T3)",
        "streamqd/supervisor/partition.py",
        ("secrets.token_hex(16), batch.done, blame", "secrets.token_hex(16), [], blame"),
        tests={
            "unit/test_partition_state.py": [
                "test_crash_charges_only_the_running_entry",
                "test_exit_with_unconfirmed_acks_refences_then_releases",
            ]
        },
    ),
    mutant(
        "a long run that is settled only after the next run",
        "after the loss of a host, a long finished run is not repeated",
        "streamqd/worker/runs.py",
        ("elapsed > quick_ns or now - settler", "now - settler"),
        tests={
            "integration/test_acknowledging.py": (
                "test_long_run_is_acknowledged_during_the_next_run[one by one]"
            )
        },
    ),
    mutant(
        "a lane that starts again before its last run is acknowledged",
        'with ack = "each" a lost host repeats one message of each lane',
        "streamqd/worker/concurrent.py",
        ("if self._ack_each and self._settler.since_ns:", "if False:"),
        tests={
            "integration/test_acknowledging.py": (
                "test_lane_acknowledges_each_run_before_its_next[in threads]"
            )
        },
    ),
    mutant(
        "rounds that do not become smaller",
        "a round that crashes is halved, so its crashes are bounded",
        "streamqd/policy/rounds.py",
        ("largest = max(1, len(running) // 2)", "largest = len(running)"),
        tests={"unit/test_rounds.py": "test_single_kill_costs_two_rounds"},
    ),
    mutant(
        "a suspect of two crashes that joins the larger round",
        "an innocent message starts 8 times at most",
        "streamqd/policy/rounds.py",
        ("min(largest, suspects.get(place, largest))", "largest"),
        tests={"unit/test_rounds.py": "test_suspect_of_two_crashes_keeps_the_smaller_round"},
    ),
    mutant(
        "a round that is larger than one of its members allows",
        "a suspect joins rounds of its size at most",
        "streamqd/policy/rounds.py",
        ("if count >= most:", "if count > most:"),
        tests={"unit/test_rounds.py": "test_single_kill_costs_two_rounds"},
    ),
    mutant(
        "a crash of a lone message that counts as progress",
        "only a crash that makes rounds smaller is no step to a crash loop",
        "streamqd/policy/rounds.py",
        ("len(running) > 1 and all(", "all("),
        tests={"unit/test_rounds.py": "test_crash_narrows_only_the_known_suspects"},
    ),
    mutant(
        "an accused message that runs next to others",
        "an accused message runs alone on its instance, so that its charge is exact",
        "streamqd/worker/quarantine.py",
        ("entry.crash_count > 0 or entry.place in self.accused", "entry.crash_count > 0"),
        tests={
            "integration/test_quarantine.py": (
                "test_exiting_worker_releases_its_turn_before_on_stop[stop-one at a time]"
            )
        },
    ),
    mutant(
        "a waiting message that is suspected after the death of a supervisor",
        "only messages that ran when a supervisor died are suspects",
        "streamqd/worker/recovery.py",
        ("accused or not self._complete", "accused or self._complete"),
        tests={
            "acceptance/test_supervisor_death.py": (
                "test_waiting_message_is_not_suspected[threads]"
            )
        },
    ),
    mutant(
        "a scoreboard that acquits the messages of an earlier loss",
        "after a loss in a marked round, all pending messages are suspects",
        "streamqd/worker/recovery.py",
        ("(self._quarantine.accused or not self._complete)", "not self._complete"),
        tests={
            "acceptance/test_supervisor_death.py": (
                "test_host_loss_in_a_marked_round_suspects_all_pending"
            )
        },
    ),
    mutant(
        "a mark that only names the first of its round",
        "the mark names every message that runs when a host is lost",
        "streamqd/worker/recovery.py",
        ("self._quarantine.begin(*left)", "self._quarantine.begin(left[0])"),
        tests={
            "integration/test_quarantine.py": ("test_held_member_has_no_mark_during_other_runs")
        },
    ),
    mutant(
        "a held message that replaces the mark of the running ones",
        "the mark names every message that runs when a host is lost",
        "streamqd/worker/quarantine.py",
        ("if self._session and not self._runs:", "if self._session:"),
        tests={
            "integration/test_quarantine.py": ("test_held_member_has_no_mark_during_other_runs")
        },
    ),
    mutant(
        "a batch that is marked before it waits for its rate",
        "no message is accused for a wait",
        "streamqd/worker/gates.py",
        ("self._is_trusted(now) and not self.held_ns(now, runs) and", "self._is_trusted(now) and"),
        tests={
            "integration/test_quarantine.py": (
                "test_round_has_no_mark_and_turn_during_a_rate_wait[a batch]"
            )
        },
    ),
    mutant(
        "a loss that charges a message that did not run alone",
        "a lost mark accuses, and only an accused or charged message is charged",
        "lua/lease_acquire.lua",
        ("if charged or string.find(", "if true or string.find("),
        tests={
            "contract/test_lease_acquire.py": (
                "test_lease_acquire_accuses_a_lost_entry_before_charging"
            )
        },
    ),
    mutant(
        "a first charge that forgets the losses before it",
        "a message that kills hosts is a dead letter after the third",
        "lua/lease_acquire.lua",
        ("charged and 1 or 3", "1"),
        tests={
            "contract/test_lease_acquire.py": [
                "test_lease_acquire_first_charge_counts_three_losses[0-3]",
                "test_lease_acquire_after_a_crash_charges_the_accused_once",
            ]
        },
    ),
    mutant(
        "a held message that a lane runs again without a mark",
        "the pending messages of a lost host run one by one, each under a mark",
        "streamqd/worker/concurrent.py",
        ("            held.mark_for_rerun(entry)\n", ""),
        tests={
            "integration/test_error_policies.py": (
                "test_quarantine_runs_due_keys_one_by_one[four at a time]"
            )
        },
    ),
    mutant(
        "a death that is charged with every repetition of the call",
        "charges <= real crashes, regardless of lost replies (T4)",
        "lua/lease_refence.lua",
        (
            "if held[1] == new then\n",
            (
                "if held[1] == new then\n"
                "  if charged ~= '' then\n"
                "    crashes = redis.call('HINCRBY', attempts, charged .. ':c', 1)\n"
                "  end\n"
            ),
        ),
        tests={"contract/test_traps.py": "test_repeated_report_of_a_crash_charges_once"},
    ),
    mutant(
        "a refence that is repeated with another token",
        "a call is repeated with equal arguments until it is answered (T4)",
        "streamqd/supervisor/partition.py",
        ("self.lease, token, ttl,", "self.lease, secrets.token_hex(16), ttl,"),
        tests={"unit/test_partition_state.py": ("test_repeated_refence_charges_once")},
    ),
    mutant(
        "a successor with the token of its predecessor",
        "packets of a dead child are rejected, and its death is charged once",
        "streamqd/supervisor/partition.py",
        (
            "        self.step = replace(refence, release_after=leaving)",
            "        self.step = Releasing() if leaving else HeldLease()",
        ),
        tests={"unit/test_mutant_gaps.py": ("test_successor_gets_a_new_token[dies]")},
    ),
    mutant(
        "a mark that survives the refence",
        "a death in quarantine is charged once (T15)",
        "lua/lease_refence.lua",
        ("redis.call('HDEL', fence, 'mark', 'session')", "redis.call('HDEL', fence, 'session')"),
        tests={"contract/test_traps.py": "test_mark_is_charged_once"},
    ),
    mutant(
        "a crash that charges all fetched messages",
        "the running message is charged, its neighbours are not",
        "lua/lease_refence.lua",
        (
            "  redis.call('HSET', attempts, charged .. ':last', context)\n",
            (
                "  redis.call('HSET', attempts, charged .. ':last', context)\n"
                "  for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', 999)) do\n"
                "    if 'm:' .. row[1] ~= charged then\n"
                "      redis.call('HINCRBY', attempts, 'm:' .. row[1] .. ':c', 1)\n"
                "    end\n"
                "  end\n"
            ),
        ),
        tests={"contract/test_mutant_gaps.py": ("test_lease_refence_charges_one_of_many_pending")},
    ),
    mutant(
        "a crash that charges the first of several running",
        "no message is charged on suspicion",
        "streamqd/supervisor/partition.py",
        ("suspects[0] if len(suspects) == 1 else None", "suspects[0] if suspects else None"),
        tests={"unit/test_partition_state.py": "test_several_running_entries_are_not_charged"},
    ),
    mutant(
        "an acknowledgment of a charged entry that rides on a read",
        "the counters of a message go with it",
        "streamqd/worker/settler.py",
        ("        if has_counters:\n", "        if has_counters is None:\n"),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_charged_message_that_succeeds_leaves_no_counters"
            )
        },
    ),
)

# --- limits, drain, reload ------------------------------------------------------------------------

LIMITS = (
    mutant(
        "a hard limit that kills at the first look",
        "a handler that is about to finish is not killed (T11)",
        "streamqd/supervisor/limits.py",
        (
            "again = self._over_hard.get(partition.slot.index) == oldest",
            "again = True",
        ),
        tests={
            "unit/test_mutant_gaps.py": [
                "test_run_over_its_hard_limit_is_killed_at_the_second_tick",
                "test_new_run_is_not_killed_for_the_previous_one",
            ]
        },
    ),
    mutant(
        "a hard limit that charges the message that runs when the signal arrives",
        "only the run for which the kill was decided is charged (T11)",
        "streamqd/supervisor/partition.py",
        ("suspects = self.slot.running_in(kill.run_seq)", "suspects = batch.running"),
        tests={"unit/test_partition_state.py": "test_late_hard_limit_charges_nothing"},
    ),
    mutant(
        "a soft limit that fires between two messages",
        "between messages the signal does nothing (Q23)",
        "streamqd/worker/soft_limit.py",
        (
            "if self.in_handler and self.slot.soft_kill_seq",
            "if self.slot.soft_kill_seq",
        ),
        tests={"integration/test_mutant_gaps.py": ("test_soft_limit_interrupts_only_its_own_run")},
    ),
    mutant(
        "a soft limit that interrupts any run",
        "the run after a run over its limit is not interrupted (Q23)",
        "streamqd/worker/soft_limit.py",
        (
            "self.in_handler and self.slot.soft_kill_seq == self.slot.words[WORD_RUN_SEQ]:",
            "self.in_handler:",
        ),
        tests={"integration/test_mutant_gaps.py": ("test_soft_limit_interrupts_only_its_own_run")},
    ),
    mutant(
        "a drain that kills",
        "a drain waits for the messages that run",
        "streamqd/supervisor/drain.py",
        ('StopWorker(each.assignment, "drain")', 'KillWorker(each.assignment, "deadline")'),
        tests={
            "unit/test_mutant_gaps.py": [
                "test_drain_finishes_the_running_message_and_releases",
                "test_drain_deadline_kills_without_a_charge",
            ]
        },
    ),
    mutant(
        "a drain that counts as a crash",
        "a message is not charged when the daemon stops its worker",
        "streamqd/supervisor/partition.py",
        ("unexpected = kill is None and not (", "unexpected = not ("),
        tests={
            "unit/test_partition_state.py": "test_kill_by_the_supervisor_charges_nothing",
            "unit/test_mutant_gaps.py": ("test_drain_deadline_kills_without_a_charge"),
        },
    ),
    mutant(
        "a release that spends an attempt",
        "attempts count failed runs, nothing else",
        "streamqd/worker/recovery.py",
        (
            "message = self._message(entry)",
            (
                'fields = [*entry.fields, b"retryCount", b"1"]\n'
                "            delivery = self._context.delivery\n"
                "            message = Message(delivery, entry.id, fields, retried=True)"
            ),
        ),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_released_message_runs_later_as_its_first_attempt"
            )
        },
    ),
    mutant(
        "a reload that fences the old worker out while it works",
        "a reload repeats no message",
        "streamqd/supervisor/rolling_replacement.py",
        ("    elif partition.is_quiet:\n", "    elif partition.child is not None:\n"),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_reload_hands_over_when_the_old_worker_is_idle"
            )
        },
    ),
    mutant(
        "an embedded server that is stopped first",
        "the embedded server runs until every message is settled",
        "streamqd/supervisor/supervisor.py",
        (
            "            self.drain.on_signal(number, timeout)\n",
            (
                "            if self.embedded is not None:\n"
                "                self.embedded.stop(5.0)\n"
                "            self.drain.on_signal(number, timeout)\n"
            ),
        ),
        tests={
            "integration/test_mutant_gaps.py": "test_embedded_server_runs_until_the_end_of_a_drain"
        },
    ),
    mutant(
        "an embedded server that Ctrl-C in a terminal stops",
        "the embedded server runs until every message is settled",
        "streamqd/embedded.py",
        ("                    start_new_session=True,\n", ""),
        tests={"integration/test_embedded.py": "test_embedded_server_ignores_ctrl_c"},
    ),
    mutant(
        "a housekeeper that takes any signal for the supervisor's death",
        "a signal to all processes of a daemon stops none of them",
        "streamqd/process.py",
        (
            "        if os.getppid() == parent_pid:\n            return",
            "        if False:\n            return",
        ),
        tests={"unit/test_process.py": ("test_parent_exit_differs_from_an_ordinary_signal")},
    ),
    mutant(
        "a dump that looks at threads while they run",
        "asking for the stack of a worker does not kill it",
        "streamqd/process.py",
        (
            "STACK_OF_THREAD, descriptor, all_threads=False)",
            "STACK_OF_THREAD, descriptor, all_threads=True)",
        ),
        tests={"unit/test_process.py": "test_stacks_are_dumped_while_threads_start_and_exit"},
    ),
    mutant(
        "a history that can keep an owner out",
        "the recorded changes of owner never decide",
        "lua/_owner_changes.lua",
        ("redis.pcall('RPUSH'", "redis.call('RPUSH'"),
        tests={
            "contract/test_owner_changes.py": (
                "test_owner_change_ignores_a_history_of_a_wrong_type"
            )
        },
    ),
    mutant(
        "a history without end",
        "Redis keeps a bounded number of changes of owner",
        "lua/_owner_changes.lua",
        ("if type(length) == 'number' and length > CHANGES_MAX then", "if false then"),
        tests={"contract/test_owner_changes.py": "test_only_the_last_owner_changes_are_kept"},
    ),
    mutant(
        "a stack that is requested again by each heartbeat",
        "a worker is asked for its stack once per request",
        "streamqd/supervisor/control.py",
        (" if before.stacks.get(assignment) != each", ""),
        tests={
            "unit/test_supervisor_control.py": (
                "test_stack_is_requested_once_and_not_after_a_restart"
            )
        },
    ),
    mutant(
        "requests for stacks that fill the directives of a fleet",
        "a pause is accepted, whatever else was requested",
        "streamqd/admin/stacks.py",
        ("if len(others) - len(old) >= REQUESTS_MAX:", "if False:"),
        tests={"integration/test_stacks.py": "test_stack_requests_are_bounded_and_expire"},
    ),
)

# --- settling: in exactly one place ---------------------------------------------------------------

SETTLING = (
    mutant(
        "a dead letter whose source goes first",
        "each message is in exactly one place, also when the insertion is refused",
        "lua/settle_dead.lua",
        ("    redis.call('XACK', entry.source, group, entry.id)\n", ""),
        (
            "    letters[at] =",
            "    redis.call('XACK', entry.source, group, entry.id)\n    letters[at] =",
        ),
        tests={
            "contract/test_settle_dead.py": (
                "test_settle_dead_failing_midway_keeps_each_entry_once"
            )
        },
    ),
    mutant(
        "settling an entry that is not pending",
        "each message is in exactly one place, also when the call is repeated",
        "lua/_settle_outcomes.lua",
        (
            (
                "if seen[item.place]"
                " or not (found.pending[id] or is_entry_pending(source, group, id)) then"
            ),
            "if seen[item.place] then",
        ),
        tests={
            "contract/test_settle_retry.py": [
                "test_settle_retry_repeated_changes_nothing",
                "test_settle_retry_after_the_promotion_changes_nothing",
            ],
            "contract/test_settle_dead.py": "test_settle_dead_repeated_changes_nothing",
        },
    ),
    mutant(
        "retries named by their id alone",
        "equal ids of the two streams are two messages (T6)",
        "lua/settle_retry.lua",
        ("packed[#packed + 1] = entry.place", "packed[#packed + 1] = entry.id"),
        ("dues[#dues + 1] = entry.place", "dues[#dues + 1] = entry.id"),
        tests={"contract/test_traps.py": ("test_equal_ids_in_both_streams_stay_two_messages")},
    ),
    mutant(
        "a failed message that stops the worker while memory is full",
        "a worker that cannot settle one message handles the others (T18)",
        "streamqd/worker/settler.py",
        ("                    deferred += items\n", "                    raise reply\n"),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_full_memory_defers_failures_but_not_acknowledgments"
            )
        },
    ),
    mutant(
        "a recovery that waits for memory",
        "a dead child is replaced although memory is full: consuming is what frees it (T14)",
        "lua/message_recover.lua",
        ("  redis.call('HDEL', fence, 'session')\n", ""),
        tests={
            "contract/test_every_script.py": "test_scripts_respect_full_memory[message_recover]"
        },
    ),
    mutant(
        "a retry that forgets the crashes",
        "a message is buried after max_crashes, retries in between or not (T8)",
        "streamqd/worker/entry.py",
        (
            "return self.crashes + self.message.crash_count",
            "return self.message.crash_count",
        ),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_crashes_before_and_after_a_retry_are_counted_together"
            )
        },
    ),
    mutant(
        "a batch that runs messages behind a held key",
        "with on_error = hold-key, no message overtakes a failed one of its key",
        "streamqd/worker/runs.py",
        (
            "if self._settle_failure(failed, error) and counts.handled != limit:",
            "if self._settle_failure(failed, error) and limit < 0:",
        ),
        tests={
            "integration/test_error_policies.py": (
                "test_held_key_keeps_its_order_while_other_keys_pass[one at a time]"
            )
        },
    ),
    mutant(
        "one attempt too many",
        "with max_attempts 5 the fifth failure is the last",
        "streamqd/policy/settlement.py",
        ("attempt >= policy.max_attempts:", "attempt > policy.max_attempts:"),
        tests={
            "unit/test_settlement.py": [
                "test_fifth_failure_is_the_last",
                "test_max_attempts_of_one_means_no_retry",
            ]
        },
    ),
    mutant(
        "retries that go to every group",
        "only the group that failed sees a message again",
        "streamqd/store/keys.py",
        (
            '"target": Keys.retry_stream,',
            '"target": lambda keys, topic, partition, _: keys.stream(topic, partition),',
        ),
        tests={
            "contract/test_message_promote.py": "test_message_promote_writes_a_retry_to_its_group"
        },
    ),
    mutant(
        "retries that do not wait",
        "nothing runs before it is due",
        "lua/message_promote.lua",
        ("'-inf', text(now), 'LIMIT'", "'-inf', '+inf', 'LIMIT'"),
        tests={"contract/test_message_promote.py": "test_message_promote_moves_due_items"},
    ),
    mutant(
        "a replay that keeps the dead letter",
        "a dead letter is replayed once",
        "lua/dead_replay.lua",
        ("redis.call('XDEL', dlq, dead_letter_id)\n", ""),
        tests={
            "contract/test_dead.py": [
                "test_dead_replay_repeated_finds_no_dead_letter",
                "test_dead_replay_writes_to_the_retry_stream",
            ]
        },
    ),
    mutant(
        "a dead letter in transit that is also replayed",
        "a dead letter is replayed once",
        "lua/dead_replay.lua",
        ("if mark then\n", "if false then\n"),
        tests={"contract/test_dead.py": "test_dead_replay_refuses_a_moving_dead_letter"},
    ),
    mutant(
        "a dead letter that arrives twice",
        "a resumed move writes nothing again",
        "lua/dead_deliver.lua",
        ("if earlier then\n", "if false then\n"),
        tests={
            "contract/test_dead.py": "test_dead_deliver_delivers_a_dead_letter_once",
            "integration/test_dead_replay.py": "test_late_step_of_a_replay_changes_nothing",
        },
    ),
    mutant(
        "a dead-letter stream that is trimmed",
        "a dead letter stays until it is purged or replayed (T9)",
        "lua/settle_dead.lua",
        ("'XADD', dlq, '*', 'failedAt'", "'XADD', dlq, 'MAXLEN', '~', 1000, '*', 'failedAt'"),
        tests={"contract/test_mutant_gaps.py": "test_stream_trim_never_trims_dead_letters"},
    ),
)

# --- groups, trimming, the fleet, producers -------------------------------------------------------

AROUND = (
    mutant(
        "a trim floor at the last delivered entry",
        "a partition is empty when all is acknowledged (T16)",
        "lua/_floors.lua",
        ("return successor(group['last-delivered-id'])", "return group['last-delivered-id']"),
        tests={
            "contract/test_traps.py": ("test_partition_is_empty_if_all_is_acknowledged"),
            "contract/test_stream_trim.py": ("test_stream_trim_floor_is_the_smallest_needed_id"),
        },
    ),
    mutant(
        "a trim floor behind the first pending entry",
        "pending entries are never trimmed (T16)",
        "lua/_floors.lua",
        (
            "return redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1][1]",
            "return successor(redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1][1])",
        ),
        tests={
            "contract/test_stream_trim.py": [
                "test_stream_trim_floor_is_the_smallest_needed_id",
                "test_stream_trim_never_removes_pending_entries",
            ]
        },
    ),
    mutant(
        "a bound of length or bytes that does not look at the floor",
        "a policy removes only entries that no group needs",
        "lua/stream_trim.lua",
        (
            "remove_nodes(stream, info, floor, room",
            "remove_nodes(stream, info, successor(last), room",
        ),
        tests={
            "contract/test_stream_trim.py": [
                "test_stream_trim_by_length_respects_the_floor",
                "test_stream_trim_by_bytes_respects_the_floor",
            ]
        },
    ),
    mutant(
        "an archive that retains nothing",
        "entries stay until they are archived, if that is required",
        "lua/stream_trim.lua",
        ("archive == '1' and (not floor", "archive == '2' and (not floor"),
        tests={"contract/test_stream_trim.py": "test_stream_trim_respects_the_archive"},
    ),
    mutant(
        "a loss that also counts entries that were read",
        "dropped entries are counted exactly",
        "lua/stream_drop.lua",
        ("removed - unread[at][1] - unread[at][2]", "removed - unread[at][1]"),
        tests={"contract/test_stream_drop.py": "test_stream_drop_counts_unread_entries_per_group"},
    ),
    mutant(
        "missing entries that are settled while their entry exists",
        "only dropped entries are settled for their group",
        "lua/missing_settle.lua",
        ("first and '(' .. first[1] or '+'", "first and first[1] or '+'"),
        tests={"contract/test_missing_settle.py": "test_missing_settle_settles_trimmed_entries"},
    ),
    mutant(
        "trimming by the file alone",
        "nothing is trimmed while the registered settings cannot be read",
        "streamqd/housekeeper/topics.py",
        (
            "return self._known[name][0] if name in self._known else None",
            "return self._known[name][0] if name in self._known else self._configured.get(name)",
        ),
        tests={
            "integration/test_retention.py": ("test_trimmer_stops_while_settings_are_unreadable")
        },
    ),
    mutant(
        "a lost group that is recreated at the last entry",
        "a lost group skips nothing (T12)",
        "streamqd/registration.py",
        ('consumer.start == "latest" and new else', 'consumer.start == "latest" else'),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_recreated_latest_group_starts_at_the_oldest_entry"
            )
        },
    ),
    mutant(
        "a group that is recreated at the last entry after the server was emptied",
        "messages sent since the server was emptied are not skipped (T12)",
        "streamqd/registration.py",
        ("new = not seen_before and not emptied", "new = not seen_before"),
        tests={
            "integration/test_mutant_gaps.py": (
                "test_group_on_an_emptied_server_starts_at_the_oldest_entry"
            )
        },
    ),
    mutant(
        "a lost group that is recreated at its floor",
        "a lost group skips nothing: positions are exclusive (T12)",
        "lua/group_ensure.lua",
        ("is_id(floor) and predecessor(floor) or start", "is_id(floor) and floor or start"),
        tests={
            "contract/test_group_ensure.py": [
                "test_group_ensure_restores_a_lost_group_below_its_floor",
                "test_group_ensure_after_a_lost_group_loses_nothing",
            ]
        },
    ),
    mutant(
        "a housekeeper that claims",
        "a worker gets no entry that it did not request (T5)",
        "streamqd/housekeeper/reclaimer.py",
        (
            "            _raise_flag(slot, walk.assignment, walk.name)\n",
            (
                "            _raise_flag(slot, walk.assignment, walk.name)\n"
                "            key, group, first = walk.key, walk.assignment.group, rows[0][0]\n"
                '            self._link.execute("XCLAIM", key, group, "w", 0, first)\n'
            ),
        ),
        tests={
            "integration/test_housekeeper.py": (
                "test_reclaimer_flags_idle_entries_of_other_clients_once"
            )
        },
    ),
    mutant(
        "a task that does not yield",
        "retries are promoted while a million letters expire",
        "streamqd/housekeeper/batch.py",
        ("            if time.monotonic() >= until:", "            if False:"),
        tests={
            "integration/test_housekeeper_turns.py": (
                "test_retries_are_promoted_while_many_dead_letters_expire"
            )
        },
    ),
    mutant(
        "a reclaim that asks for idle entries alone",
        "a foreign consumer with a million new entries does not block the server",
        "lua/_ranges.lua",
        ("group, '(' .. id,", "group, 'IDLE', 1000, '(' .. id,"),
        tests={"unit/test_script_bounds.py": "test_no_script_calls_an_unbounded_command"},
    ),
    mutant(
        "members that are dead by age alone",
        "a pause of the server moves no partition (T10)",
        "streamqd/policy/silence.py",
        ("not (old and silence.checks >= SILENT_HEARTBEATS):", "not old:"),
        tests={"unit/test_rebalance.py": ("test_server_pause_makes_no_member_dead_by_age")},
    ),
    mutant(
        "another partition for the same key",
        "the partition of a key never changes",
        "streamqd/policy/partitioning.py",
        ("zlib.crc32(key) % count", "zlib.adler32(key) % count"),
        tests={
            "unit/test_partitioning.py": [
                "test_crc32_partition_matches_fixed_vectors",
                "test_crc32_partition_matches_librdkafka",
            ]
        },
    ),
    mutant(
        "a dedup id that is ignored",
        "a message with a dedup id is written once",
        "lua/message_publish.lua",
        ("  if earlier then\n", "  if false then\n"),
        tests={"contract/test_publishing.py": "test_publish_writes_a_dedup_id_once"},
    ),
    mutant(
        "writes by the old partition count after a topic has grown",
        "a message never goes to a partition that its key has left",
        "lua/_routed.lua",
        ("if present ~= partitions and", "if not present and"),
        tests={
            "contract/test_publishing.py": "test_append_refuses_a_changed_partition_count",
            "integration/test_growth.py": "test_producer_of_several_topics_notices_a_growth",
        },
    ),
    mutant(
        "messages are sent to a deleted topic",
        "nothing is sent to a retired or deleted topic",
        "lua/_routed.lua",
        ("~= tonumber(partitions) then", "~= tonumber(partitions) and present then"),
        tests={"contract/test_publishing.py": "test_append_refuses_a_retired_topic"},
    ),
    mutant(
        "a limit that lets a whole chunk through",
        "a message is not written to a partition in which max_backlog wait",
        "lua/_write.lua",
        (" and written < room", ""),
        tests={"contract/test_publishing.py": "test_append_writes_the_messages_that_fit"},
    ),
)

# --- schedules: each tick once, without a leader --------------------------------------------------

SCHEDULES = (
    mutant(
        "a tick that does not compare the due time",
        "each tick is sent once, even if several housekeepers try",
        "lua/schedule_fire.lua",
        (
            "if not number or tonumber(text(number)) ~= tonumber(step.due) then",
            "if not number then",
        ),
        tests={
            "contract/test_schedules.py": [
                "test_schedule_fire_repeated_fires_once",
                "test_schedule_fire_stops_at_a_gap_between_ticks",
            ]
        },
    ),
    mutant(
        "a tick that leaves its due time",
        "each tick is sent once, even if several housekeepers try",
        "lua/schedule_fire.lua",
        (
            "redis.call('ZADD', due, step.following, name)",
            "redis.call('ZADD', due, step.due, name)",
        ),
        tests={"contract/test_schedules.py": "test_schedule_fire_writes_a_tick_and_advances"},
    ),
    mutant(
        "a tick of another specification",
        "an edited schedule sends nothing of the old one",
        "lua/schedule_fire.lua",
        ("elseif hash ~= step.hash then", "elseif false then"),
        tests={"contract/test_schedules.py": "test_schedule_fire_refuses_another_specification"},
    ),
    mutant(
        "a tick by the clock of the host",
        "the server's clock decides whether a tick is due",
        "lua/schedule_fire.lua",
        ("elseif number > now then", "elseif false then"),
        tests={"contract/test_schedules.py": "test_schedule_fire_uses_the_server_clock"},
    ),
    mutant(
        "an orphaned schedule that continues",
        "a schedule that no instance declares stops",
        "lua/schedule_fire.lua",
        ("elseif seen and now - (to_int(seen) or 0) > orphan_ms then", "elseif false then"),
        tests={"contract/test_schedules.py": "test_schedule_fire_refuses_an_orphan"},
    ),
    mutant(
        "a tick to a topic of another size",
        "a message never goes to a partition that its key has left",
        "lua/schedule_fire.lua",
        ("if count ~= partitions then", "if false then"),
        tests={
            "contract/test_schedules.py": "test_schedule_fire_refuses_a_changed_partition_count"
        },
    ),
    mutant(
        "an overlap setting that is ignored",
        "with overlap, one message of a schedule is unfinished at most",
        "lua/schedule_fire.lua",
        ("if busy then", "if false then"),
        tests={
            "contract/test_schedules.py": [
                "test_overlap_skips_a_tick_while_a_message_is_unfinished",
                "test_overlap_applies_to_ticks_of_one_call",
            ]
        },
    ),
    mutant(
        "a tick that is sent again after an edit",
        "x-schedule and x-scheduled-for never repeat together",
        "lua/schedule_fire.lua",
        ("written[name] or sent and to_int(sent) or -1", "-1"),
        tests={"contract/test_schedules.py": "test_schedule_fire_does_not_repeat_a_sent_tick"},
    ),
    mutant(
        "a deploy that changes an unchanged schedule",
        "an unchanged schedule keeps its due time",
        "lua/schedule_declare.lua",
        ("if known_hash == hash then", "if false then"),
        tests={"contract/test_schedules.py": "test_schedule_declare_repeated_changes_nothing"},
    ),
    mutant(
        "an older file that replaces a newer one",
        "of two releases, the file that was read later wins",
        "lua/schedule_declare.lua",
        ("if not newer and now - seen <= takeover_ms then", "if false then"),
        tests={
            "contract/test_schedules.py": "test_schedule_declare_by_an_earlier_file_is_refused",
            "integration/test_schedules.py": "test_later_release_wins_while_both_run",
        },
    ),
    mutant(
        "a file that takes the name of an operator",
        "a schedule of an operator stays as it is",
        "lua/schedule_declare.lua",
        ("if known_origin ~= origin then", "if false then"),
        tests={"contract/test_schedules.py": "test_schedule_declare_keeps_an_operators_schedule"},
    ),
    mutant(
        "an edit that resumes",
        "a paused schedule stays paused until it is resumed",
        "lua/schedule_declare.lua",
        ("if reason == 'paused' then", "if false then"),
        tests={"contract/test_schedules.py": "test_schedule_declare_keeps_a_pause"},
    ),
    mutant(
        "a stamp that resumes",
        "a paused schedule stays paused until it is resumed",
        "lua/schedule_stamp.lua",
        ("if each.reason == 'orphaned' then", "if each.reason then"),
        tests={"contract/test_schedules.py": "test_schedule_stamp_keeps_a_pause"},
    ),
    mutant(
        "a hold that leaves it due",
        "a held schedule sends nothing",
        "lua/schedule_hold.lua",
        ("redis.call('ZREM', due, name)", "redis.call('ZSCORE', due, name)"),
        tests={"contract/test_schedules.py": "test_schedule_hold_keeps_the_due_time"},
    ),
    mutant(
        "a manual run that repeats the headers of a tick",
        "x-schedule and x-scheduled-for never repeat together",
        "lua/schedule_run.lua",
        ("to_int(tick or nil) or 0, to_int(ran or nil) or 0", "to_int(ran or nil) or 0, 0"),
        tests={"contract/test_schedules.py": "test_schedule_run_refuses_the_instant_of_a_tick"},
    ),
    mutant(
        "an edit that forgets which tick was sent",
        "a clock that is set back repeats no tick",
        "streamqd/schedules/reconciliation.py",
        (
            "tick = next_tick(schedule, max(now_unix_ms - offset, sent))",
            "tick = next_tick(schedule, now_unix_ms - offset)",
        ),
        tests={
            "integration/test_schedules.py": (
                "test_edit_after_a_clock_step_back_does_not_repeat_a_tick"
            )
        },
    ),
    mutant(
        "a move that is not noted first",
        "a move that a crash interrupts is finished",
        "streamqd/schedules/reconciliation.py",
        (
            "store, each.name, IndexLine(entry.fleet, entry.origin, place, origin), new=False",
            "store, each.name, entry, new=False",
        ),
        tests={
            "integration/test_schedules.py": (
                "test_interrupted_schedule_move_by_growth_is_finished"
            )
        },
    ),
    mutant(
        "a second copy that is sent as well",
        "a schedule is sent only where its name is kept",
        "streamqd/schedules/firing.py",
        (
            "self._select_local(place, self._readable_schedules(place, rows))",
            "self._readable_schedules(place, rows)",
        ),
        tests={"integration/test_schedules.py": "test_second_copy_of_a_schedule_sends_nothing"},
    ),
    mutant(
        "an hour that comes twice",
        "each tick is sent once on the day of change",
        "streamqd/schedules/ticks.py",
        ("        if tick > last:\n", "        if tick:\n"),
        tests={"unit/test_schedules.py": ["test_tick_is_not_repeated_within_the_repeated_hour"]},
    ),
    mutant(
        "missed ticks that are sent as if on time",
        "misfire decides about missed ticks",
        "streamqd/schedules/ticks.py",
        ("missed = now - tick > grace_ms(schedule, tick)", "missed = False"),
        tests={
            "unit/test_schedules.py": "test_missed_ticks_follow_the_misfire_policy",
            "integration/test_schedules.py": "test_twenty_missed_ticks_follow_the_policy",
        },
    ),
)

# --- an outbox: each committed row once -----------------------------------------------------------

_RELAY = "integration/test_outbox_relay.py"
OUTBOX = (
    mutant(
        "a relay that was replaced publishes",
        "an earlier epoch writes nothing",
        "lua/outbox_publish.lua",
        ("if present > tonumber(epoch) then", "if false then"),
        tests={
            "contract/test_outbox.py": (
                "test_outbox_fence_returns_last_batch_and_refuses_old_epochs"
            ),
        },
    ),
    mutant(
        "a record that is not replaced",
        "the rows of the last batch are recorded",
        "lua/outbox_publish.lua",
        ("if added > 0 then", "if false then"),
        tests={
            "contract/test_outbox.py": ("test_outbox_publish_skips_recorded_rows"),
        },
    ),
    mutant(
        "a record without the rows that were skipped",
        "a row that may still be in the table stays recorded",
        "lua/outbox_publish.lua",
        ("    kept[#kept + 1] = row\n", ""),
        tests={
            "contract/test_outbox.py": ("test_outbox_publish_records_rows_before_a_full_stream"),
        },
    ),
    mutant(
        "a limit that an outbox ignores",
        "a row is not written to a partition in which max_backlog wait",
        "lua/outbox_publish.lua",
        ("  elseif not stopped and added == room then\n", "  elseif false then\n"),
        tests={"contract/test_outbox.py": "test_outbox_publish_writes_the_rows_that_fit"},
    ),
    mutant(
        "rows of an earlier relay that are not deleted first",
        "a record is replaced only after its rows are deleted",
        "streamqd/outbox/relay.py",
        ("self._settled += [OutboxRow(each.id, each.uid) for each in recorded]", "del recorded"),
        tests={
            _RELAY: ("test_recorded_row_is_deleted_even_if_not_the_oldest[sqlite]"),
        },
    ),
    mutant(
        "the epoch of a call whose reply was lost",
        "a call that is executed late is refused",
        "streamqd/outbox/relay.py",
        (
            "            self._epoch = 0\n            self._registered",
            "            self._registered",
        ),
        tests={_RELAY: "test_publish_with_a_lost_reply_raises_the_epoch[sqlite]"},
    ),
    mutant(
        "rows that were read before the fence",
        "the relay fences, then reads the rows again",
        "streamqd/outbox/relay.py",
        ("                found.read_again = True\n        except", "        except"),
        tests={_RELAY: "test_relay_rereads_rows_read_before_the_fence[sqlite]"},
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *FENCE,
    *LOST_AND_LATE,
    *DEATH,
    *LIMITS,
    *SETTLING,
    *AROUND,
    *SCHEDULES,
    *OUTBOX,
)
