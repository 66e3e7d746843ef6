"""Build safe paths below one of streamqd's directories, from names that another program chose.

Names of topics, groups and instances become parts of paths. With `..`, an absolute part or a
symbolic link, a path could leave the directory, and streamqd would write or remove files of another
program.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from streamqd.errors import InvalidRequestError, RequestRefusedError

# `Path` turns `s3a://bucket` into `s3a:/bucket`. A scheme of one letter is part of a path, as on
# Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
# Schemes of object stores, and the usual form of each. `s3a` is Hadoop's name for the same store.
_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "abfss": "abfss"}
_STORE_FORMS = (
    "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or"
    " abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?")
_OBJECT = re.compile(r"[A-Za-z0-9._=+-]+")  # part of an object's name that needs no escaping


def store_url(named: str | Path) -> str | None:
    """Return the URL of a directory in an object store, or None for any other name.

    In the result, `s3a` has become `s3`, and there is no slash at the end. Raises
    InvalidRequestError for a URL that cannot be used. The text of the error contains neither a
    password nor the query, which could be a signature.
    """
    text = str(named)
    found = _SCHEME.match(text)
    scheme = _STORES.get(found[1].lower()) if found else None
    if found is None or scheme is None:
        return None
    bucket, *parts = text[found.end() :].removeprefix("/").rstrip("/").split("/")
    if ":" in bucket:
        raise InvalidRequestError(
            f"a {scheme}:// address must not contain a password or a port; set credentials and the"
            " endpoint in the environment, the profile or [archive.options]"
        )
    if (
        not text[found.end() - 1 :].startswith("//")
        or not _BUCKET.fullmatch(bucket)
        or ("@" in bucket) != (scheme == "abfss")
        or any(not _OBJECT.fullmatch(each) or set(each) == {"."} for each in parts)
    ):
        raise InvalidRequestError(
            f"{text.partition('?')[0]} is not a valid directory URL; use {_STORE_FORMS}. Its parts"
            " can contain only A-Z a-z 0-9 . _ - = +, and no query is allowed"
        )
    return f"{scheme}://" + "/".join((bucket, *parts))


def local_folder(named: str | Path) -> Path:
    """Return the directory that a path or a URI `file:///…` names, without accessing it.

    Raises InvalidRequestError for any other URI, because it would otherwise be used as the name of
    a local directory.
    """
    text = str(named)
    found = _SCHEME.match(text)
    if found is None:
        return Path(named)
    rest = text[found.end() - 1 :]
    if found[1].lower() == "file" and not rest.startswith("//"):
        return Path(unquote(rest))
    if found[1].lower() == "file" and rest.startswith(("///", "//localhost/")):
        return Path(unquote("/" + rest.removeprefix("//").partition("/")[2]))
    raise InvalidRequestError(
        f"{text.partition('?')[0]} is not a directory of this machine, so nothing was written; pass"
        " a path or file:///PATH. Only --archive and --out take an object store"
    )


def join_parts(root: Path, *parts: str | PurePosixPath) -> Path:
    """Return `root` joined with the parts. The path does not need to exist.

    Raises RequestRefusedError if the result would not be below `root`: if a part is absolute or
    contains `..` or a NUL byte, or if there are no parts. Also raises it if there is a symbolic
    link at any level below `root`, whatever its target is. `root` itself may be or contain a link.
    """
    # PurePosixPath drops `.` and empty parts. If a part is absolute, it drops all parts before it.
    joined = PurePosixPath(*parts)
    if joined.is_absolute() or not joined.parts or ".." in joined.parts:
        raise RequestRefusedError(f"{str(joined)!r} is not a path below {root}")
    try:
        real_root = os.path.realpath(root)
        real = os.path.realpath(root / joined)
    except ValueError as error:  # a NUL byte, or not a valid file name
        raise RequestRefusedError(f"{str(joined)!r} is not a path below {root}") from error
    if Path(real) != Path(real_root, joined):
        raise RequestRefusedError(
            f"{root / joined} contains a symbolic link below {root}; remove the link (nothing was"
            " done)"
        )
    return root / joined


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Replace a file atomically, so that readers see either the old or the new content.

    Lone surrogates are replaced by `?`. If the host crashes, the new content may be lost. Raises
    OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, "utf-8", "replace")
        if mode is not None:
            part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove_below(root: Path, *parts: str | PurePosixPath) -> None:
    """Remove a directory below `root` and its content. If it does not exist, do nothing.

    Raises RequestRefusedError in the same cases as `join_parts`, and if a file cannot be removed.
    """
    folder = join_parts(root, *parts)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        if folder.exists():  # another process has removed one of its files
            raise RequestRefusedError(
                f"{folder} is being removed by another process; try again"
            ) from None
    except OSError as error:
        raise RequestRefusedError(
            f"{folder} cannot be removed ({error.strerror}): {error.filename}"
        ) from error
