"""The measured driver: a Spark session that runs the jobs named on standard input.

    python -m tests.benchmarks.spark_jobs SOCKET FOLDER

Each line of input is one word. The answer is one line of JSON with rows and seconds.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hiredis
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition
from pyspark.sql.datasource import WriterCommitMessage as Message
from pyspark.sql.types import Row, StructType

from streamqd import config
from streamqd.spark import session
from streamqd.spark.pipelines.archive import Archiver
from streamqd.spark.reader import EntryReader
from streamqd.spark.source import SpanPartition, StreamqSource, TopicReader

TOPIC = "access"
TARGETS = {"write": "copy", "write_tuples": "copies"}


class TupleReader(TopicReader):
    """The same reader, but it yields rows as tuples, as most sources in Python do."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SpanPartition)
        topic, number = partition.span.place
        for entries in EntryReader(self.options, partition.span).batches():
            for entry_id, flat in entries:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                ms, _, seq = entry_id.decode().partition("-")
                moment = dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC)
                yield (
                    *(fields.get(b"key"), fields.get(b"payload", b""), topic, number),
                    *(entry_id.decode(), int(ms), int(seq), moment),
                )


class TupleSource(StreamqSource):
    """A source that reads rows as tuples."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def reader(self, schema: StructType) -> DataSourceReader:
        made = super().reader(schema)
        assert isinstance(made, TopicReader)
        return TupleReader(made.options, made.chosen)


class TupleWriter(DataSourceWriter):
    """Writes rows with a plain packed XADD, one at a time and at least once each."""

    def __init__(self, path: str, streams: list[str]) -> None:
        self.path, self.streams = path, streams

    def write(self, iterator: Iterator[Row]) -> Message:
        from tests.benchmarks.spark_single import BATCH, Connection

        connection = Connection(self.path)
        packed: list[bytes] = []
        for number, row in enumerate(iterator):
            stream = self.streams[number % len(self.streams)]
            fields: Any = ("payload", bytes(row.value), "key", bytes(row.key))
            packed.append(hiredis.pack_command(("XADD", stream, "*", *fields)))
            if len(packed) == BATCH:
                self._send(connection, packed)
                packed = []
        self._send(connection, packed)
        return Message()

    def _send(self, connection: Any, packed: list[bytes]) -> None:
        connection.sock.sendall(b"".join(packed))
        for _ in packed:
            connection.reply()


class TupleSink(DataSource):
    """A sink that writes rows which arrive as tuples."""

    @classmethod
    def name(cls) -> str:
        return "tuple_sink"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: ARG002
        return TupleWriter(self.options["socket"], self.options["streams"].split(","))


class Jobs:
    """The available jobs."""

    def __init__(self, path: str, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.url = f"unix://{path}"
        self.settings = replace(config.Settings(), redis=replace(config.Redis(), url=self.url))
        self.spark = session("benchmark", conf={"spark.ui.showConsoleProgress": "false"})
        for source in (TupleSource, TupleSink):
            self.spark.dataSource.register(source)

    def read(self) -> int:
        self._topic("streamq").write.format("noop").mode("overwrite").save()
        return 0

    def read_tuples(self) -> int:
        self._topic("tuples").write.format("noop").mode("overwrite").save()
        return 0

    def archive(self) -> int:
        """Archive into a new archive each time."""
        archiver = Archiver(
            self.settings, self._empty("archive"), lambda: self.spark, lambda _: None
        )
        with contextlib.closing(archiver):
            return archiver.run([TOPIC])[0].rows

    def archive_rows(self) -> int:
        """Read Arrow batches, but send the rows through Java, which writes the files."""
        return self._files("streamq", "rows")

    def archive_tuples(self) -> int:
        return self._files("tuples", "tuples")

    def write(self) -> int:
        options = {"url": self.url, "topic": TARGETS["write"]}
        self._stored().write.format("streamq").options(**options).mode("append").save()
        return 0

    def write_tuples(self) -> int:
        names = [f"stream:topic:{{{TARGETS['write_tuples']}:p:{number}}}" for number in range(4)]
        options = {"socket": self.path, "streams": ",".join(names)}
        self._stored().write.format("tuple_sink").options(**options).mode("append").save()
        return 0

    def _topic(self, name: str) -> Any:
        options = {"url": self.url, "subscribe": TOPIC}
        return self.spark.read.format(name).options(**options).load()

    def _files(self, name: str, folder: str) -> int:
        from pyspark.sql import functions as f

        frame = self._topic(name).withColumn("dt", f.to_date("timestamp"))
        writer = frame.write.partitionBy("dt", "partition").option("compression", "zstd")
        writer.parquet(str(self._empty(folder)))
        return 0

    def _stored(self) -> Any:
        return self.spark.read.parquet(str(self.folder / "source")).select("key", "value")

    def _empty(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def main() -> None:
    """Answer until the input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps any other output apart from the answers
    jobs = Jobs(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        work: Callable[[], int] = getattr(jobs, line.strip())
        began = time.monotonic()
        rows = work()
        print(
            json.dumps({"rows": rows, "seconds": time.monotonic() - began}),
            file=answers,
            flush=True,
        )
    jobs.spark.stop()


if __name__ == "__main__":
    # Classes of __main__ would be sent by value, but Spark's helpers identify them by name.
    from tests.benchmarks import spark_jobs

    spark_jobs.main()
