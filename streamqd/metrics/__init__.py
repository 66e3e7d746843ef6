"""Metrics for Prometheus: the table, the figures that it reads, and the exporter.

Nothing is counted here: at a scrape the table reads the scoreboard and the figures that the
housekeeper has measured last, so a message costs no metric call. Counters of a worker live in its
slot and survive its death. They start again with the supervisor. Labels are bounded by the
configuration: topics, partitions, groups, this instance.

The package imports none of its modules, because every process has a view, and only the process that
serves HTTP needs the others.
"""
