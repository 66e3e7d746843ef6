"""Metrics for Prometheus: the table, the figures that it reads, and the exporter.

Workers do not call this package, so a message costs no metric call. At a scrape, the table reads
the scoreboard and the last figures that the housekeeper measured. The counters of a worker are in
its slot. They survive the exit of the worker, and start at 0 again when the supervisor restarts.
The configuration limits the number of label values: topics, partitions, groups, and this instance.

The package imports none of its modules, because every process uses `view`, but only the process
that serves HTTP needs the others.
"""
