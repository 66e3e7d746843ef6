"""What an archive's manifests say: which files count, and up to where a partition is stored."""

from __future__ import annotations

from typing import Any

import pytest

from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import File, Manifest, ManifestError, Range


def batch(
    first: int,
    last: int | None = None,
    generation: int = 0,
    ranges: dict[int, tuple[int, int]] | None = None,
    size: int = 10,
) -> Manifest:
    """Batch n holds (10n, 10n+10] of partition 0 unless told, one entry per millisecond."""
    last = first if last is None else last
    spans = {0: (10 * first, 10 * last + 10)} if ranges is None else ranges
    return Manifest(
        topic="access",
        first=first,
        last=last,
        generation=generation,
        ranges={
            p: Range((low, 0), (high, 0), high - low, high) for p, (low, high) in spans.items()
        },
        files=tuple(
            File(
                path=f"{manifests.file_folder(low, p)}/{manifests.file_name(p, 0, generation)}",
                partition=p,
                rows=high - low,
                size=size,
                first=(low + 1, 0),
                last=(high, 0),
            )
            for p, (low, high) in spans.items()
        ),
        written_unix_ms=7,
    )


def test_layout() -> None:
    made = batch(3)
    assert str(made.folder) == "topic=access/batch=3"
    assert str(made.path) == "_manifest/access/0000000003-0000000003.g0.json"
    assert made.files[0].path == "dt=1970-01-01/partition=0/part-g0-00000-00000.zstd.parquet"
    assert manifests.is_manifest(made.path.name)
    assert not manifests.is_manifest(made.path.name + ".tmp")
    assert manifests.date_of(1_763_683_199_999) == "2025-11-20"
    assert manifests.date_of(1_763_683_200_000) == "2025-11-21"
    assert manifests.date_of(1 << 63) == "9999-12-31"


def test_text_and_back() -> None:
    made = batch(0, ranges={0: (0, 10), 11: (0, 4)})
    text = manifests.dumps(made)
    again = manifests.loads(text)
    assert (again.path, again.ranges, set(again.files)) == (made.path, made.ranges, {*made.files})
    assert manifests.dumps(again) == text
    assert again.rows == 14


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', manifests.dumps(batch(0)).replace('"end"', '"no"')]
)
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ManifestError, match="that one"):
        manifests.loads(text, "that one")


def changed(made: Manifest, **of_file: Any) -> Manifest:
    import dataclasses

    files = (dataclasses.replace(made.files[0], **of_file), *made.files[1:])
    return dataclasses.replace(made, files=files)


def test_files_and_ranges_must_agree() -> None:
    manifests.check(batch(1, ranges={0: (10, 20), 1: (3, 4)}))
    with pytest.raises(ManifestError, match="9 rows of partition 0, not 10"):
        manifests.check(changed(batch(1), rows=9))
    with pytest.raises(ManifestError, match="outside"):
        manifests.check(changed(batch(1), first=(10, 0)))  # the start itself is not of the range
    with pytest.raises(ManifestError, match="outside"):
        manifests.check(changed(batch(1), last=(20, 1)))
    with pytest.raises(ManifestError, match=r"\[7\]"):
        manifests.check(changed(batch(1, ranges={0: (10, 10), 1: (3, 4)}), partition=7, rows=1))


def test_the_later_generation_counts() -> None:
    old = [batch(number) for number in range(4)]
    new = batch(0, 2, generation=1)
    listed = [*old, new]
    assert manifests.current(listed) == [new, old[3]]
    assert manifests.superseded(listed) == old[:3]
    assert manifests.current([]) == []


def test_what_is_not_clear_is_refused() -> None:
    with pytest.raises(ManifestError, match="batch 1"):
        manifests.current([batch(0), batch(2)])
    with pytest.raises(ManifestError, match="two manifests"):
        manifests.current([batch(0, 1, 1), batch(1, 2, 1)])
    with pytest.raises(ManifestError, match="only in part"):
        manifests.current([batch(0, 2, 1), batch(1, 1, 2)])


def test_the_watermark_is_the_end_without_a_gap() -> None:
    listed = [
        batch(0, ranges={0: (0, 10), 1: (0, 5)}),
        batch(1, ranges={0: (10, 20)}),
        batch(2, ranges={0: (20, 25), 1: (6, 9), 2: (0, 1)}),
        batch(3, ranges={1: (9, 12)}),
    ]
    found = {partition: each.end for partition, each in manifests.ends(listed).items()}
    assert found == {0: (25, 0), 1: (5, 0), 2: (1, 0)}


def test_merging() -> None:
    listed = [
        batch(4, ranges={0: (0, 10), 1: (0, 5)}),
        batch(5, 7, 2, ranges={0: (10, 20)}),
        batch(8, ranges={1: (5, 6)}),
    ]
    new = manifests.merged(listed, [], 9)
    assert (new.first, new.last, new.generation) == (4, 8, 3)
    assert new.ranges == {0: Range((0, 0), (20, 0), 20, 20), 1: Range((0, 0), (6, 0), 6, 6)}
    with pytest.raises(ManifestError, match="neighbours"):
        manifests.merged([listed[0], listed[2]], [], 9)
    with pytest.raises(ManifestError, match="gap"):
        manifests.merged([batch(0), batch(1, ranges={0: (11, 12)})], [], 9)


def test_what_is_worth_compacting() -> None:
    listed = [batch(number, size=size) for number, size in enumerate((10, 10, 10, 95, 40, 40, 40))]
    runs = manifests.runs_to_compact(listed, target=100)
    assert [[each.first for each in run] for run in runs] == [[0, 1, 2], [4, 5]]
    assert manifests.runs_to_compact([], target=100) == []
