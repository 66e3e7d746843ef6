"""The checker of the Spark soak test finds lost, duplicated and unknown rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import redis

from streamqd.store.client import Connection
from tests.support.servers import Server

pytest.importorskip("deltalake")
import deltalake

from tests.support.row_ledger import (
    Producer,
    archived_position,
    find_faults,
    read_ledger,
    read_parsed,
    read_parsed_rows,
    read_quarantine_rows,
    read_replayed_rows,
    read_stream_rows,
    read_table_rows,
    stream,
)

PARTITIONS = 2
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
FIELDS = pa.map_(pa.string(), pa.binary())


@pytest.fixture
def client(link: Connection, server: Server) -> Iterator[redis.Redis]:
    """A plain client of the server, which `link` has emptied."""
    link.execute("PING")
    with redis.Redis.from_url(server.url) as made:
        yield made


@pytest.fixture
def ledger(client: redis.Redis, tmp_path: Path) -> Path:
    file = tmp_path / "logs.ledger"
    Producer(client, "logs", PARTITIONS, file, seed=1).write(300)
    return file


def test_row_ledger_imports_no_streamqd_module() -> None:
    code = (
        "import sys, tests.support.row_ledger; print([n for n in sys.modules if 'streamqd' in n])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_row_ledger_finds_faults_in_a_topic(client: redis.Redis, ledger: Path) -> None:
    rows = read_ledger(ledger)
    assert rows.total() == 300
    assert len({row.content for row in rows}) < 300, "some rows are alike"
    assert (
        find_faults("topic", read_stream_rows(client, "logs", PARTITIONS), rows, whole=True) == []
    )

    gone = next(row for row in rows if row.partition == 1)
    client.xdel(stream("logs", 1), gone.id)
    found = read_stream_rows(client, "logs", PARTITIONS)
    assert find_faults("topic", found, rows, whole=True) == [f"topic: 1 lost, as {gone!r}"]
    assert find_faults("topic", found, rows, whole=False) == []

    client.xadd(stream("logs", 0), {"payload": "of nobody"})
    found = read_stream_rows(client, "logs", PARTITIONS)
    (line,) = find_faults("topic", found, rows, whole=False)
    assert line.startswith("topic: 1 never written, as Row(partition=0")
    contents = ["one", "one", "two"]
    (line,) = find_faults("copy", _counted(*contents, "two"), _counted(*contents), whole=True)
    assert line == "copy: 1 more often than written, as 'two'"


def _counted(*each: str) -> Counter[str]:
    return Counter(each)


def test_row_ledger_compares_whole_rows(client: redis.Redis, ledger: Path, tmp_path: Path) -> None:
    rows = read_ledger(ledger)
    assert read_table_rows(str(tmp_path / "table")) == {}
    lines = []
    for partition in range(PARTITIONS):
        for name, entry in client.xrange(stream("logs", partition)):
            headers = json.loads(entry.get(b"headers", b"{}"))
            others = {"sentAt": entry[b"sentAt"]} if b"sentAt" in entry else {}
            lines.append(
                {
                    "partition": partition,
                    "id": name.decode(),
                    "value": entry[b"payload"],
                    "key": entry.get(b"key"),
                    "headers": [{"key": k, "value": v.encode()} for k, v in headers.items()],
                    "fields": list(others.items()),
                }
            )
            headers |= {"x-replay-of": f"logs/{partition}/{name.decode()}"}
            client.xadd(stream("again", 0), entry | {b"headers": json.dumps(headers)})
    columns = pa.table(
        {
            name: pa.array([line[name] for line in lines], kind)
            for name, kind in (
                *(("partition", pa.int32()), ("id", pa.string()), ("value", pa.binary())),
                *(("key", pa.binary()), ("headers", HEADERS), ("fields", FIELDS)),
            )
        }
    )
    deltalake.write_deltalake(str(tmp_path / "table"), columns)
    assert read_table_rows(str(tmp_path / "table")) == rows
    origins = Counter((f"logs/{row.partition}/{row.id}", row.content) for row in rows)
    assert read_replayed_rows(client, "again", 1) == origins

    deltalake.write_deltalake(str(tmp_path / "table"), columns.slice(5, 1), mode="append")
    (line,) = find_faults("archive", read_table_rows(str(tmp_path / "table")), rows, whole=False)
    assert line.startswith("archive: 1 more often than written, as Row(")
    last = client.xrevrange(stream("again", 0), count=1)[0][1]
    client.xadd(stream("again", 0), last | {b"payload": b"another"})
    (line,) = find_faults("replay", read_replayed_rows(client, "again", 1), origins, whole=False)
    assert line.startswith("replay: 1 never written, as ('logs/1/")


def test_row_ledger_compares_parsed_and_quarantined_rows(
    client: redis.Redis, ledger: Path, tmp_path: Path
) -> None:
    fits, does_not = read_parsed(ledger)
    assert (fits + does_not).total() == 300
    assert min(fits.total(), does_not.total()) > 0
    assert read_parsed_rows(str(tmp_path / "parsed")) == {}
    good = [{"entry_partition": p, "entry_id": name, "number": n} for p, name, n in fits]
    bad = [
        {"partition": partition, "id": name.decode(), "value": entry[b"payload"]}
        for partition in range(PARTITIONS)
        for name, entry in client.xrange(stream("logs", partition))
        if not entry[b"payload"].endswith(b"}")
    ]
    deltalake.write_deltalake(str(tmp_path / "parsed"), pa.Table.from_pylist(good[1:]))
    deltalake.write_deltalake(str(tmp_path / "quarantine"), pa.Table.from_pylist(bad))
    (line,) = find_faults("parsed", read_parsed_rows(str(tmp_path / "parsed")), fits, whole=True)
    assert line.startswith("parsed: 1 lost, as Parsed(")
    assert read_quarantine_rows(str(tmp_path / "quarantine")) == does_not


def test_row_ledger_reads_the_archived_position(client: redis.Redis) -> None:
    assert archived_position(client, "logs", 0) == "0-0"
    client.hset("streaming:mq:trim:{logs:p:0}", "archived", "5-3")
    assert archived_position(client, "logs", 0) == "5-3"
