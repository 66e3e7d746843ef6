"""Metrics for Prometheus.

The package consists of the table of metrics, the figures that the table reads, and the exporter.
Workers do not call it, so metrics add no cost to a message. At each scrape, the table reads the
scoreboard and the figures that the housekeeper measured last. The counters of a worker are stored
in its slot of the scoreboard. They are kept when the worker exits, and start again at 0 when the
supervisor restarts. The number of label values is limited by the configuration, because labels
contain only topics, partitions, groups and this instance.

The package does not import its own modules. Every process uses `view`, but only the process that
serves HTTP needs the others.
"""
