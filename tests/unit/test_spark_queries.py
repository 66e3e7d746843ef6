"""What makes Spark fail, as a sentence."""

from __future__ import annotations

import pytest

from streamqd.spark.pipelines.queries import sentence

LOST = (
    "Job aborted due to stage failure: Task 0 in stage 5.0 failed 1 times, most recent failure:"
    " Lost task 0.0 in stage 5.0 (TID 13) (localhost executor driver):"
    " org.apache.spark.SparkException:"
)
CRASHED = "Python worker exited unexpectedly (crashed)."
CALLING = "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe."


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            f"{CALLING}\n: org.apache.spark.SparkException: {LOST} {CRASHED}\n\tat org.apache.X",
            CRASHED,
        ),
        (
            f"[STREAM_FAILED] Query [id = 1] terminated: {LOST} {CRASHED}\n\tat org.apache.X",
            CRASHED,
        ),
        (f"{CALLING}\n: java.lang.OutOfMemoryError\n\tat java.X", "java.lang.OutOfMemoryError"),
        (CALLING, CALLING),
        (
            "[NO_TABLE] There is no table x. SQLSTATE: 42P01\nmore",
            "[NO_TABLE] There is no table x.",
        ),
        (f"{LOST} {CRASHED}\nstreamqd.errors.RedisRefused: WRONGTYPE x\n", "WRONGTYPE x"),
    ],
)
def test_what_made_spark_fail_is_a_sentence(raised: str, told: str) -> None:
    assert sentence(Exception(raised)) == told
