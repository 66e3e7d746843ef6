"""A Spark job that copies the topic `orders` to the topic `copy` exactly once.

    streamqd pipeline run tests.support.copy_job:copy --checkpoints FOLDER

It stops after the rows that existed when it started. Rows are distributed over as many tasks as
there are cores. If a batch is repeated with another number of cores, it therefore has other tasks
and another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamqd.spark.pipelines.run import Job

SOURCE, TARGET = "orders", "copy"
BATCH = "2000"


def copy(job: Job) -> None:
    """Start the query of the job."""
    rows = job.stream(
        SOURCE, includeHeaders="true", includeFields="true", maxOffsetsPerTrigger=BATCH
    )
    dealt = rows.select("key", "value", "headers", "fields").repartition(
        job.spark.sparkContext.defaultParallelism
    )
    job.sink(dealt, TARGET, "copy").trigger(availableNow=True).start()
