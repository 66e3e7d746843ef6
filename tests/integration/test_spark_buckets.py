"""Archives in an object store, without Spark: commits, faults, two writers and credentials."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.errors import InvalidRequestError, RequestRefusedError, SparkError
from streamqd.paths import store_url
from streamqd.spark.location import BucketFolder, location
from streamqd.spark.offsets import Position
from streamqd.store import topics
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from streamqd.store.store import Store
from tests.support.servers import Server

pytest.importorskip("deltalake")
pytest.importorskip("moto")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.fs")

from streamqd.spark import rows as columns  # noqa: E402
from streamqd.spark.pipelines import compact, storage  # noqa: E402
from streamqd.spark.pipelines import derived as pairs  # noqa: E402
from streamqd.spark.pipelines.lookup import find_entry  # noqa: E402
from streamqd.spark.pipelines.parts import PartWriter, WrittenFile  # noqa: E402
from streamqd.spark.pipelines.storage import (  # noqa: E402
    Archive,
    ArchiveDamagedError,
    ArchiveError,
    ArchiveTable,
)
from tests.support.s3 import KEY, SECRET, BucketServer, StoreFault  # noqa: E402

PLACE = ("access", 0)
EVERY = columns.columns(dead=False, headers=True, fields=True)
SCHEMA = columns.arrow_schema([each for each in EVERY if each.name not in ("topic", "partition")])
COMMITS = r"_delta_log/[0-9]+\.json"


@pytest.fixture(scope="module")
def buckets() -> Iterator[BucketServer]:
    with BucketServer() as made:
        yield made


@pytest.fixture
def store(buckets: BucketServer) -> BucketServer:
    buckets.heal()
    return buckets


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/{re.sub(r'[^a-z0-9_]+', '-', request.node.name.lower())}"


def open_table(archive: Archive) -> ArchiveTable:
    made = archive.table("access", create=True)
    assert made is not None
    return made


def write_files(into: ArchiveTable, low: int, high: int) -> list[WrittenFile]:
    writer = PartWriter(into.folder, 0)
    found = [
        {"id": f"{each}-0", "id_ms": each, "id_seq": 0, "value": b"v"}
        for each in range(low + 1, high + 1)
    ]
    writer.write(pa.RecordBatch.from_pylist(found, SCHEMA))
    return writer.finish()


def add(into: ArchiveTable, low: int, high: int) -> list[WrittenFile]:
    files = write_files(into, low, high)
    into.append(files, {PLACE: Position((high, 0), high)})
    return files


def read_ids(archive: Archive, store: BucketServer) -> list[int]:
    """Return the archived IDs in the same way as other programs read them."""
    deltalake = pytest.importorskip("deltalake")
    table = deltalake.DeltaTable(str(archive.folder("access")), storage_options=store.options)
    return sorted(table.to_pyarrow_table(columns=["id_ms"])["id_ms"].to_pylist())


def test_archive_in_a_bucket_equals_one_on_disk(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    add(made, 0, 3)
    add(open_table(archive), 3, 5)
    again = Archive(url.replace("s3://", "s3a://"), options=store.options)
    assert (again.id, again.topics(), str(again.root)) == (archive.id, ["access"], url)
    assert open_table(again).positions == {PLACE: Position((5, 0), 5)}
    assert read_ids(again, store) == [1, 2, 3, 4, 5]
    found = find_entry(url, "access", 0, "4-0", store.options)
    assert found.found
    assert found.file.startswith(f"{url}/tables/access/date=1970-01-01/partition=0/")
    assert not find_entry(url, "access", 0, "9-0", store.options).found
    with pytest.raises(RequestRefusedError, match="is not an archive; create it"):
        Archive(f"{url}/other", options=store.options)
    with pytest.raises(RequestRefusedError, match="neither empty nor an archive"):
        Archive(f"{url}/tables", create=True, options=store.options)


def test_directory_marker_counts_as_an_empty_directory(store: BucketServer, url: str) -> None:
    """A directory marker, which is the object `NAME/`, does not count as content.

    An archive can still be created there.
    """
    system = pa.fs.S3FileSystem(
        access_key=KEY, secret_key=SECRET, endpoint_override=store.url, region="us-east-1"
    )
    place = url.removeprefix("s3://")
    system.create_dir(place)
    archive = Archive(url, create=True, options=store.options)
    system.create_dir(f"{place}/tables/access")
    assert sorted(archive.root.names()) == ["_archive.json", "tables"]
    open_table(archive)
    assert archive.topics() == ["access"]


def test_engines_read_an_archive_in_a_bucket(store: BucketServer, url: str) -> None:
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    archive = Archive(url, create=True, options=store.options)
    add(open_table(archive), 0, 3)
    frame = polars.scan_delta(f"{url}/tables/access", storage_options=store.options).collect()
    assert sorted(frame["id_ms"].to_list()) == [1, 2, 3]
    deltalake = pytest.importorskip("deltalake")
    table = deltalake.DeltaTable(f"{url}/tables/access", storage_options=store.options)
    dataset = table.to_pyarrow_dataset()  # noqa: F841 - DuckDB finds it by its name
    [(count,)] = duckdb.sql("SELECT count(*) FROM dataset").fetchall()
    assert count == 3


def test_bucket_refuses_one_of_two_concurrent_commits(store: BucketServer, url: str) -> None:
    """Two commits start from the same state.

    A commit is a conditional PUT, so the store accepts only one of them.
    """
    archive = Archive(url, create=True, options=store.options)
    add(open_table(archive), 0, 2)
    tables = [open_table(archive), open_table(archive)]
    files = [write_files(each, 2, 5) for each in tables]
    ready, results = threading.Barrier(2), []

    def commit(number: int) -> None:
        ready.wait(10)
        try:
            tables[number].append(files[number], {PLACE: Position((5, 0), 5)})
            results.append("committed")
        except RequestRefusedError as error:
            results.append(str(error))

    threads = [threading.Thread(target=commit, args=(number,)) for number in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    said = f"another run wrote to {url}/tables/access at the same time; run the command again"
    assert sorted(results) == [said, "committed"]
    assert read_ids(archive, store) == [1, 2, 3, 4, 5]


def test_concurrent_creations_make_one_table(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    ready, made = threading.Barrier(2), []

    def create() -> None:
        ready.wait(10)
        try:
            made.append(open_table(archive).version)
        except (RequestRefusedError, ArchiveError) as error:
            made.append(str(error))

    threads = [threading.Thread(target=create) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert made == [0, 0]
    add(open_table(archive), 0, 1)
    assert read_ids(archive, store) == [1]


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", COMMITS), ("PUT", r"\.parquet"), ("POST", r"\.parquet"), ("GET", r"\.json")],
)
def test_throttled_request_is_repeated(
    store: BucketServer, url: str, method: str, path: str
) -> None:
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    store.fail(method, path, StoreFault.SLOW_DOWN, times=2)
    add(made, 0, 3)
    add(open_table(archive), 3, 4)
    assert read_ids(archive, store) == [1, 2, 3, 4]


def test_commit_with_a_lost_reply_counts_once(store: BucketServer, url: str) -> None:
    """If the reply to a commit is lost, the client sends it again and finds its own commit."""
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    for number in range(3):
        store.fail("PUT", COMMITS, StoreFault.LOST_REPLY)
        add(made, 10 * number, 10 * number + 2)
    assert made.note.batch == 3
    assert read_ids(archive, store) == [1, 2, 11, 12, 21, 22]
    assert open_table(archive).positions == made.positions


def test_failed_commit_leaves_the_table_unchanged(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    add(made, 0, 2)
    files = write_files(made, 2, 4)
    store.fail("PUT", COMMITS, StoreFault.EXPIRED, times=1000)
    with pytest.raises(ArchiveError, match="tables/access cannot be written: ") as caught:
        made.append(files, {PLACE: Position((4, 0), 4)})
    assert (KEY in str(caught.value), SECRET in str(caught.value)) == (False, False)
    assert "\n" not in str(caught.value)
    store.heal()
    assert read_ids(archive, store) == [1, 2]
    add(open_table(archive), 2, 4)
    assert read_ids(archive, store) == [1, 2, 3, 4]


def test_failed_upload_leaves_no_object(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    store.fail("PUT", r"\.parquet", StoreFault.EXPIRED, times=1000)
    with pytest.raises(OSError, match=r"Forbidden|privileges|denied"):
        write_files(made, 0, 2)
    store.heal()
    assert made.find_unnamed(0) == []
    add(made, 0, 2)
    assert read_ids(archive, store) == [1, 2]


def test_errors_contain_no_credentials(store: BucketServer, url: str) -> None:
    """Errors contain no credentials.

    The server repeats them in its answers, as S3 does with a key's ID.
    """
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    add(made, 0, 2)
    store.fail("GET", ".", StoreFault.EXPIRED, times=10_000)
    store.fail("HEAD", ".", StoreFault.EXPIRED, times=10_000)
    said = []
    for work in (
        lambda: Archive(url, options=store.options),
        archive.topics,
        lambda: archive.table("access"),
        lambda: archive.table("orders", create=True),
        made.reload,
        lambda: made.verify(made.files()),
        lambda: find_entry(url, "access", 0, "1-0", store.options),
    ):
        with pytest.raises((RequestRefusedError, SparkError)) as caught:
            work()
        said.append(str(caught.value))
    assert not [each for each in said if KEY in each or SECRET in each or "\n" in each]
    assert KEY not in repr(archive.root)


def test_errors_contain_no_password_of_an_endpoint() -> None:
    made = location("s3://bucket/a", {"aws_endpoint_url": "http://me:hush-hush@127.0.0.1:1"})
    told = made.describe_error(
        OSError("Error performing HEAD http://me:hush-hush@127.0.0.1:1/a in 1 ms")
    )
    assert told == "Error performing HEAD http://me:***@127.0.0.1:1/a in 1 ms"


def test_small_files_in_a_bucket_are_merged_and_purged(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    for low in range(5):
        add(made, low, low + 1)
    [orphan] = write_files(made, 100, 101)
    old, new = compact.rewrite(made, 1 << 20)
    assert (len(old), [each.rows for each in new]) == (5, [5])
    assert compact.purge(made, 3600.0) == 0
    assert compact.purge(made, 0.0) == 6
    assert compact.purge(made, 0.0) == 0
    assert read_ids(archive, store) == [1, 2, 3, 4, 5]
    with pytest.raises(ArchiveDamagedError, match="is missing"):
        made.verify([orphan])


@pytest.mark.parametrize("name", ["../a.parquet", "..%2Fa.parquet", "b/..%252F..%252Fa.parquet"])
def test_object_name_stays_within_its_directory(store: BucketServer, url: str, name: str) -> None:
    outside = location(url, store.options)
    outside.write("a.parquet", b"kept")
    folder = outside.subfolder("inside")
    for access in (folder.read, folder.open_input, folder.open_output, folder.subfolder):
        with pytest.raises(RequestRefusedError, match="is not a name in an archive"):
            access(name)
    assert not folder.remove(name)
    assert outside.read("a.parquet") == b"kept"


def test_merge_with_a_lost_reply_changes_no_row(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    for low in range(compact.FAN_IN):
        add(made, low, low + 1)
    store.fail("PUT", COMMITS, StoreFault.LOST_REPLY)
    compact.merge_small_files(made, 1)
    assert read_ids(archive, store) == [*range(1, compact.FAN_IN + 1)]
    add(open_table(archive), compact.FAN_IN, compact.FAN_IN + 1)
    assert read_ids(archive, store) == [*range(1, compact.FAN_IN + 2)]


def test_table_log_in_a_bucket_does_not_grow_with_age(
    store: BucketServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_CHECKPOINT", 5)
    short = {"delta.checkpointInterval": "5", "delta.logRetentionDuration": "interval 0 days"}
    monkeypatch.setattr(storage, "_CONFIGURATION", storage._CONFIGURATION | short)
    archive = Archive(url, create=True, options=store.options)
    made = open_table(archive)
    for low in range(21):
        add(made, low, low + 1)
    log = [each for each in made.folder.subfolder("_delta_log").names() if each.endswith(".json")]
    assert len(log) < 10
    assert read_ids(archive, store) == [*range(1, 22)]


def test_owed_files_in_a_bucket_are_committed_later(store: BucketServer, url: str) -> None:
    archive = Archive(url, create=True, options=store.options)
    archive.derived_table("orders", pairs.PARSED, pairs.parsed_columns())
    pair = pairs.open_pair(archive, "orders")
    assert pair is not None
    pair.parsed.append([], {("orders", 0): Position((1, 0))}, owed=storage.UnparsedFiles(0, ()))
    again = pairs.open_pair(archive, "orders")  # killed between the two
    assert again is not None
    assert again.quarantine.positions == {("orders", 0): Position((1, 0))}


def test_report_round_trips_through_a_bucket(store: BucketServer, url: str) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("jinja2")
    from streamqd.spark.pipelines import report as reports
    from tests.unit.test_spark_report import document, live_fleet

    out = location(url, store.options)
    assert reports._read_last_report(out) is None
    written_document = document(live_fleet())
    reports._write(out, written_document)
    assert sorted(out.names()) == ["report.html", "report.json"]
    assert reports._read_last_report(out) == json.loads(json.dumps(written_document))
    out.write("report.json", b"{}")
    with pytest.raises(
        RequestRefusedError, match="was not written by a report, so it is not overwritten"
    ):
        reports._read_last_report(out)
    store.fail("PUT", "report", StoreFault.EXPIRED, times=100)
    store.fail("POST", "report", StoreFault.EXPIRED, times=100)
    with pytest.raises(SparkError, match="the report cannot be written") as caught:
        reports._write(out, written_document)
    assert KEY not in str(caught.value)


def test_commands_without_spark_accept_a_bucket(
    store: BucketServer, url: str, server: Server, link: Connection, keys: Keys, tmp_path: Path
) -> None:
    """Commands that need no Spark accept a bucket.

    Its options come from the configuration, and the commands print the URL.
    """
    archive = Archive(url, create=True, options=store.options)
    for low in range(3):
        add(open_table(archive), low, low + 1)
    topics.create(Store(link, keys), "access", config.Topic(partitions=1))
    link.execute("XADD", keys.stream("access", 0), "2-0", "payload", "x")
    lines = ["[redis]", f'url = "{server.url}"', "[keys]"]
    lines += [f'control = "{keys.control}"', f'streams = "{keys.streams}"', "[archive.options]"]
    lines += [f'{name} = "{value}"' for name, value in store.options.items()]
    file = tmp_path / "streamq.toml"
    file.write_text("\n".join([*lines, ""]))
    file.chmod(0o600)

    def ask(*arguments: str) -> Any:
        done = CliRunner().invoke(cli, ["-c", str(file), *arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    [merged] = ask("pipeline", "compact", "--archive", url)["topics"]
    assert (merged["files_before"], merged["files_after"]) == (3, 1)
    found = ask("trace", "access/0/2-0", "--archive", url.replace("s3:", "s3a:"))["archive"]
    assert found["found"]
    assert found["file"].startswith(f"{url}/tables/access/date=1970-01-01/partition=0/")
    shown = CliRunner().invoke(cli, ["-c", str(file), "config", "show"])
    assert "aws_secret_access_key" in shown.stdout
    assert SECRET not in shown.stdout


# --- addresses and credentials --------------------------------------------------------------------


@pytest.mark.parametrize("source", ["environment", "profile", "options"])
def test_credentials_from_environment_profile_or_options_work(
    store: BucketServer, url: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    for name in (*store.options, "aws_profile", "aws_session_token"):
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # asks no service of the host
    options: dict[str, str] = dict(store.place)
    if source == "environment":
        options = {}
        for name, value in store.options.items():
            monkeypatch.setenv(name.upper(), value)
    elif source == "profile":
        lines = [f"{name} = {value}" for name, value in secret.items()]
        text = "\n".join(["[profile mine]", *lines]) + "\n"
        (tmp_path / "AWS_CONFIG_FILE").write_text(text)
        monkeypatch.setenv("AWS_PROFILE", "mine")
    else:
        options |= secret
    archive = Archive(url, create=True, options=options)
    add(open_table(archive), 0, 2)
    assert read_ids(archive, store) == [1, 2]


def test_explicit_credentials_use_no_metadata_service(
    store: BucketServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explicit credentials need no metadata service.

    No client asks Amazon's for its region, because other hosts have none.
    """
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", store.url)
    store.requests()
    add(open_table(Archive(url, create=True, options=store.options)), 0, 2)
    assert [each for each in store.requests() if "/latest/" in each] == []
    without = {name: value for name, value in store.options.items() if name != "aws_region"}
    assert "aws_force_credential_load" in location(url, without).options, "a profile may have it"


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("S3A://bucket/a", "s3://bucket/a"),
        ("gs://my.bucket/a=1", "gs://my.bucket/a=1"),
        ("abfss://box@acc.dfs.core.windows.net/a", "abfss://box@acc.dfs.core.windows.net/a"),
        ("s3://bucket", "s3://bucket"),
        ("/data/s3", None),
        ("file:///data", None),
        ("hdfs://host/a", None),
    ],
)
def test_store_url_is_normalized(named: str, found: str | None) -> None:
    assert store_url(named) == found


@pytest.mark.parametrize(
    "named",
    ["s3:/bucket/a", "s3://", "s3://bucket//a", "s3://bucket/../a", "s3://bucket/a b", "s3://b/a%20",
     "s3://key:secret@bucket/a", "s3://me@bucket/a", "abfss://box/a", "gs://b/a?x=1", "gs://b/./a",
     "abfss://box@acc.dfs.core.windows.net/a?sv=1&sig=secret"],
)  # fmt: skip
def test_store_url_rejects_other_addresses(named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        store_url(named)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("gs://bucket/a", {"google_service_account_key": "{}"}),
        ("abfss://box@acc.dfs.core.windows.net/a", {"azure_storage_account_key": "a2V5"}),
    ],
)
def test_options_of_other_stores_are_passed_to_their_client(
    named: str, options: dict[str, str]
) -> None:
    """The options of other stores reach their client.

    Only the parsing is tested, because no trustworthy server of these stores is available as a
    Python package.
    """
    made = location(named, options)
    assert isinstance(made, BucketFolder)
    assert dict(made.options) == options
    assert str(made.subfolder("tables", "access")) == f"{named}/tables/access"


def test_configured_store_options_are_checked_and_masked(tmp_path: Path) -> None:
    file = tmp_path / "streamq.toml"

    def loaded(text: str, mode: int = 0o600) -> Any:
        file.write_text(text)
        file.chmod(mode)
        return config.load(file, environ={})

    settings = loaded(
        '[archive.options]\nAWS_REGION = "eu-central-1"\naws_secret_access_key = "hush"\n'
        "aws_allow_http = true\n"
    )
    assert settings.archive.pairs == {
        "aws_region": "eu-central-1", "aws_secret_access_key": "hush", "aws_allow_http": "true",
    }  # fmt: skip
    assert "hush" not in json.dumps(config.as_document(settings))
    for text, mode, said in (
        ('[archive]\noptions = "x"', 0o600, "archive.options: is not a table"),
        ("[archive.options]\na = []", 0o600, "archive.options: has a, which is not a string"),
        ('[archive.options]\naws_s3_allow_unsafe_rename = "true"', 0o600, "two writers overwrite"),
        ('[archive.options]\nConditional_Put = "disabled"', 0o600, "streamqd sets itself"),
        ('[archive.options]\naws_secret_access_key = "hush"', 0o644, "other users may read"),
    ):
        with pytest.raises(config.load.__globals__["ConfigError"], match=said) as caught:
            loaded(text, mode)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize("address", ["minio.internal:9000", "minio", "http://", ""])
def test_endpoint_that_is_not_a_url_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint that is not a URL is refused.

    The client of the store would panic, which no command can report as an error.
    """
    for name in ("AWS_ENDPOINT_URL", "aws_endpoint"):
        with pytest.raises(
            InvalidRequestError, match=f"variable {name.lower()} is not a URL; write it"
        ):
            location("s3://bucket/a", {name: address})
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(InvalidRequestError, match="variable aws_endpoint_url is not a URL"):
        Archive("s3://bucket/a", create=True)


def test_option_for_unsafe_commits_is_refused() -> None:
    made = location("s3://bucket/a", {"aws_s3_allow_unsafe_rename": "true"})
    assert made.options["aws_s3_allow_unsafe_rename"] == "false"
    assert made.options["aws_conditional_put"] == "etag"
