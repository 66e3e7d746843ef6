"""Metrics for Prometheus: the table, the figures that it reads, and the exporter.

Nothing is counted here. At a scrape, the table reads the scoreboard and the last figures that the
housekeeper measured, so a message costs no metric call. The counters of a worker are in its slot
and survive its death. They restart with the supervisor. The configuration limits the number of
label values: topics, partitions, groups, and this instance.

The package imports none of its modules, because every process uses `view`, but only the process
that serves HTTP needs the others.
"""
