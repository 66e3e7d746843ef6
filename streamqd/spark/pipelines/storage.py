"""The archive on disk: publishing batches, finding what is current, finishing what was broken off.

One folder that the driver and all executors see under the same path. Every step can be repeated
after a SIGKILL; `recover` does that, at the begin of each run. What is published has reached the
disk before anybody is told, because Redis forgets it then.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from streamqd.config.setting import NAME
from streamqd.errors import Refused
from streamqd.paths import below, remove_below
from streamqd.spark.pipelines import manifest as manifests
from streamqd.spark.pipelines.manifest import File, Manifest, ManifestError

_SIGN = "_archive.json"  # marks the folder as an archive and names it


class Archive:
    """An archive folder. Writing belongs to whoever holds the lease on the topic.

    Whatever is written, moved or removed goes through `paths.below`, so no name of a topic and no
    manifest leads out of the folder: that is Refused.
    """

    def __init__(self, root: Path, *, create: bool = False) -> None:
        """Open the folder. Raises Refused when it is none and may not be made."""
        self.root = root.absolute()
        sign = self.root / _SIGN
        if create and not sign.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            if any(self.root.iterdir()):
                raise Refused(f"{root} is neither empty nor an archive: name another folder")
            _write(sign, json.dumps({"format": manifests.FORMAT, "id": uuid.uuid4().hex}) + "\n")
        try:
            self.id = str(json.loads(sign.read_bytes())["id"])
        except FileNotFoundError:
            raise Refused(
                f"there is no archive in {root}; `streamqd pipeline archive` makes one"
            ) from None

    # --- reading ---

    def topics(self) -> list[str]:
        """Topics of which something is archived."""
        folder = self.root / "_manifest"
        found = folder.iterdir() if folder.is_dir() else []
        return sorted(each.name for each in found if NAME.fullmatch(each.name))

    def all_manifests(self, topic: str) -> list[Manifest]:
        """Every manifest of a topic, also those that no longer count.

        Raises ManifestError, and Refused for a topic that is not a folder of the archive.
        """
        if not NAME.fullmatch(topic):
            raise Refused(f"{topic!r} is not the name of a topic")
        below(self.root, manifests.topic_folder(topic))
        folder = below(self.root, manifests.manifest_folder(topic))
        if not folder.is_dir():
            return []
        found = [
            manifests.loads(path.read_bytes(), str(path))
            for path in sorted(folder.iterdir())
            if manifests.is_manifest(path.name)
        ]
        for each in found:
            if each.topic != topic:
                raise ManifestError(f"{folder} holds a manifest of another topic: {each.topic}")
        return found

    def current(self, topic: str) -> list[Manifest]:
        """The manifests that count, in order. Raises ManifestError."""
        return manifests.current(self.all_manifests(topic))

    def files(self, listed: Iterable[Manifest]) -> list[Path]:
        """Where the files of manifests are. Raises ManifestError when one is missing."""
        return [self.locate(each, file) for each in listed for file in each.files]

    def locate(self, holder: Manifest, file: File) -> Path:
        """Where a file is: at its place, or still in staging when a compaction was broken off."""
        for path in self.places(holder, file)[:2]:
            if path.exists():
                return path
        raise ManifestError(f"{self.root / holder.folder / file.path} is missing")

    def places(self, holder: Manifest, file: File) -> list[Path]:
        """Where a file can be: at its place, still in staging, or put aside as replaced."""
        folders = (holder.folder, self._staged(holder), manifests.retired_folder(holder))
        return [self.root / folder / file.path for folder in folders]

    # --- publishing ---

    def stage(self, topic: str, number: int, generation: int = 0) -> Path:
        """An empty folder to prepare a batch in. What an earlier try left there is gone."""
        relative = manifests.staging_folder(topic, number, generation)
        remove_below(self.root, relative)
        folder = below(self.root, relative)
        folder.mkdir(parents=True)
        return folder

    def gather(self, staged: Path, parts: Iterable[tuple[Path, str]]) -> Path:
        """Move the finished files of tasks to their relative paths in the batch's folder.

        What other attempts of the same tasks wrote stays behind.
        """
        batch = staged / "batch"
        batch.mkdir()
        folders = {batch}
        for source, relative in parts:
            target = below(batch, relative)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            folders |= {target.parent, target.parent.parent}
        for folder in folders:
            _flush_folder(folder)
        return batch

    def publish(self, ready: Path, new: Manifest) -> None:
        """Make a prepared batch visible: first its files, all at once, then its manifest.

        Raises Refused when another run was first.
        """
        manifests.check(new)
        text = manifests.dumps(new)
        _write(ready / manifests.INSIDE, text)
        target = below(self.root, new.folder)
        self._make(target.parent)
        try:
            ready.rename(target)
        except OSError as error:
            raise Refused(f"{target} is there already: another run wrote it") from error
        _flush_folder(target.parent)
        self._declare(new, text)

    def replace(self, ready: Path, new: Manifest) -> None:
        """Make a compacted batch current, put aside what it replaces, then take its place."""
        manifests.check(new)
        text = manifests.dumps(new)
        _write(ready / manifests.INSIDE, text)
        self._declare(new, text)
        self._settle(new.topic)

    def recover(self, topic: str) -> None:
        """Finish what a killed run left half done. Raises ManifestError when that is not clear."""
        known = self.current(topic)
        following = known[-1].last + 1 if known else 0
        left = self.root / manifests.batch_folder(topic, following) / manifests.INSIDE
        if left.exists():
            # Renamed, and killed before its manifest was written.
            found = manifests.loads(left.read_bytes(), str(left))
            if (found.topic, found.last) != (topic, following):
                raise ManifestError(f"{left} is of batch {found.last} of {found.topic}")
            manifests.check(found)
            self._declare(found, manifests.dumps(found))
        self._settle(topic)
        folder = below(self.root, manifests.topic_folder(topic))
        known_folders = {each.folder.name for each in self.current(topic)}
        for each in sorted(folder.iterdir()) if folder.is_dir() else []:
            if each.name not in known_folders:
                raise ManifestError(f"{each} belongs to no manifest: move it away")

    def verify(self, listed: Iterable[Manifest]) -> None:
        """Demand that every file is there with the rows of its manifest. Raises ManifestError."""
        from pyarrow import parquet

        for holder in listed:
            for file in holder.files:
                path = self.locate(holder, file)
                rows = parquet.read_metadata(path).num_rows
                if rows != file.rows:
                    raise ManifestError(f"{path} has {rows} rows, not {file.rows}")

    def purge(self, topic: str, grace: float) -> int:
        """Delete what was replaced longer than `grace` seconds ago; return how many batches."""
        deleted = 0
        for old in manifests.superseded(self.all_manifests(topic)):
            retired = below(self.root, manifests.retired_folder(old))
            if retired.exists():
                if time.time() - retired.stat().st_ctime < grace:
                    continue
                remove_below(self.root, manifests.retired_folder(old))
            below(self.root, old.path).unlink()
            deleted += 1
        return deleted

    # --- parts ---

    def _staged(self, holder: Manifest) -> PurePosixPath:
        return manifests.staging_folder(holder.topic, holder.last, holder.generation) / "batch"

    def _declare(self, new: Manifest, text: str) -> None:
        path = below(self.root, new.path)
        self._make(path.parent)
        _write(path, text)

    def _settle(self, topic: str) -> None:
        """Move the files of current manifests to their place, and what they replaced from there."""
        listed = self.all_manifests(topic)
        for old in manifests.superseded(listed):
            inside = below(self.root, old.folder, manifests.INSIDE)
            if inside.exists() and inside.read_text("utf-8") == manifests.dumps(old):
                retired = below(self.root, manifests.retired_folder(old))
                self._make(retired.parent)
                inside.parent.rename(retired)
        for new in manifests.current(listed):
            target, staged = below(self.root, new.folder), below(self.root, self._staged(new))
            if not target.exists() and staged.exists():
                staged.rename(target)
        folder = below(self.root, manifests.topic_folder(topic))
        if folder.is_dir():
            _flush_folder(folder)
        remove_below(self.root, manifests.STAGING, topic)

    def _make(self, folder: Path) -> None:
        """Make a folder that outlives a loss of power."""
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            _flush_folder(folder.parent)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(path.name + ".tmp")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
