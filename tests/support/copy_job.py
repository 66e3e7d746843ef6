"""A job of Spark that copies the topic `orders` into the topic `copy`, exactly once.

    streamqd pipeline run tests.support.copy_job:copy --checkpoints FOLDER

It ends with what was there at its start. Rows are dealt anew to as many tasks as there are cores,
so a batch that comes again with other cores comes in other tasks and in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamqd.spark.pipelines.run import Job

SOURCE, TARGET = "orders", "copy"
BATCH = "2000"


def copy(job: Job) -> None:
    """Start the query."""
    rows = job.stream(
        SOURCE, includeHeaders="true", includeFields="true", maxOffsetsPerTrigger=BATCH
    )
    dealt = rows.select("key", "value", "headers", "fields").repartition(
        job.spark.sparkContext.defaultParallelism
    )
    job.sink(dealt, TARGET, "copy").trigger(availableNow=True).start()
