"""Paths below a folder of ours that are made of names that another program has chosen.

Topics, groups and instances become parts of paths. `..`, an absolute part or a symbolic link would
lead out of the folder, and what is written or removed there would belong to another program.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from streamqd.errors import Malformed, Refused

# `Path` makes `s3a:/bucket` of `s3a://bucket`. A scheme of one letter is a folder, as on Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_folder(named: str | Path) -> Path:
    """Return the folder that a path or a URI `file:///…` names. Touches nothing.

    Raises Malformed for any other URI: it would become a local folder of that name.
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
    raise Malformed(
        f"{text} is not a folder of this machine; pass a path, or file:///PATH (object stores are"
        " not supported, mount them or use NFS); nothing was written"
    )


def below(root: Path, *parts: str | PurePosixPath) -> Path:
    """Return `root` joined with the parts, which need not exist.

    Raises Refused when that is not below `root`: for an absolute part, `..`, nothing at all, a NUL
    byte, and for a symbolic link on the way from `root` down, wherever that leads. `root` itself
    may be or hold links.
    """
    # PurePosixPath drops `.` and empty parts, and lets an absolute part replace those before it.
    joined = PurePosixPath(*parts)
    if joined.is_absolute() or not joined.parts or ".." in joined.parts:
        raise Refused(f"{str(joined)!r} is not a path below {root}")
    try:
        real_root = os.path.realpath(root)
        real = os.path.realpath(root / joined)
    except ValueError as error:  # a NUL byte, or a text that no file name can be
        raise Refused(f"{str(joined)!r} is not a path below {root}") from error
    if Path(real) != Path(real_root, joined):
        raise Refused(
            f"{root / joined} has a symbolic link below {root}: remove the link; nothing was done"
        )
    return root / joined


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file whole or not at all: a reader sees the old one or the new one. Raises OSError.

    Half characters become `?`. A crash of the host may lose what was written.
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
    """Remove a folder below `root` with all that it holds; a missing one is removed already.

    Raises Refused as `below` does, and when something cannot be removed.
    """
    folder = below(root, *parts)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        if folder.exists():  # another process has removed something in it meanwhile
            raise Refused(f"{folder} is being removed by somebody else: try again") from None
    except OSError as error:
        raise Refused(f"{folder} cannot be removed ({error.strerror}): {error.filename}") from error
