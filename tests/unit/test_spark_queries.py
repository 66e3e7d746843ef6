"""A failure of Spark is reported in one sentence that contains the reason."""

from __future__ import annotations

import pytest

from streamqd.errors import RedisResponseError, RedisUnavailableError, StreamqdError
from streamqd.spark.pipelines.queries import PipelineError, cause_sentence, to_streamqd_error

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
        (f"{LOST} {CRASHED}\nstreamqd.errors.RedisResponseError: WRONGTYPE x\n", "WRONGTYPE x"),
    ],
)
def test_spark_failure_is_reported_as_one_sentence(raised: str, told: str) -> None:
    assert cause_sentence(Exception(raised)) == told


@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        ("streamqd.errors.RedisUnavailableError: no answer", RedisUnavailableError, "no answer"),
        (
            "streamqd.errors.SilentConnectionError: 127.0.0.1:1 is dead",
            RedisUnavailableError,
            "127.0.0.1:1 is",
        ),
        (
            "streamqd.errors.RedisResponseError: LOADING the dataset",
            RedisResponseError,
            "LOADING the dataset",
        ),
        ("streamqd.errors.TopicNotFoundError: no topic x", PipelineError, "no topic x"),
        ("", PipelineError, CRASHED),
    ],
)
def test_outage_inside_spark_keeps_its_error_class(
    raised: str, kind: type[StreamqdError], told: str
) -> None:
    """An outage of Redis has the same exit code inside a task as elsewhere."""
    found = to_streamqd_error(Exception(f"{LOST} {CRASHED}\n{raised}\n\tat org.apache.X"))
    assert type(found) is kind
    assert str(found).startswith(told)
    assert not isinstance(found, RedisResponseError) or found.code == "LOADING"
