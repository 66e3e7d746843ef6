"""A path that is joined with a foreign name never leaves its root directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamqd.config.setting import NAME
from streamqd.errors import InvalidRequestError, RequestRefusedError
from streamqd.paths import join_parts, local_folder, remove_below
from tests.support.quick import examples

HOSTILE = (
    *(
        "",
        ".",
        "..",
        "../..",
        "../outside",
        "a/../..",
        "a/../../outside",
        "/",
        "//",
        "/etc",
        "./..",
    ),
    *(
        "a/../a",
        "..\0",
        "\0",
        "a\nb",
        "\udc80",
        "\ud800",
        "~",
        "link",
        "link/x",
        "inner/up",
        "x" * 300,
    ),
)
pieces = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(alphabet=st.sampled_from("./\\ab\0~ é\udc80"), max_size=12),
    st.text(max_size=20),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with links that lead outside and inside, next to a file that is outside."""
    base = tmp_path_factory.mktemp("paths")
    made = base / "root"
    (made / "inner").mkdir(parents=True)
    (base / "outside").mkdir()
    (base / "outside" / "kept").touch()
    (made / "link").symlink_to(base / "outside")
    (made / "back").symlink_to(made / "inner")
    (made / "inner" / "up").symlink_to("../..")
    return made


@given(st.lists(pieces, max_size=4))
@settings(max_examples=examples(500))
@example([".."])
@example(["a", ".."])
@example(["_staging", "..", ".."])
@example(["link"])
@example(["back", "x"])
def test_joined_path_is_below_its_root_or_refused(root: Path, parts: list[str]) -> None:
    """Whatever the parts are, the joined path is either below the root or refused."""
    try:
        found = join_parts(root, *parts)
    except RequestRefusedError:
        return
    assert os.path.commonpath([os.path.realpath(root), os.path.realpath(found)]) == str(root)
    assert os.path.realpath(found) != str(root)


@given(st.lists(pieces, max_size=3))
@settings(max_examples=examples(300))
@example([".."])
@example(["."])
@example(["inner", "up"])
def test_removal_deletes_nothing_outside_its_folder(root: Path, parts: list[str]) -> None:
    """A removal keeps files outside of the root, the root itself, and the targets of links."""
    (root / "inner").mkdir(exist_ok=True)
    with contextlib.suppress(RequestRefusedError):
        remove_below(root, *parts)
    assert (root.parent / "outside" / "kept").exists()
    assert (root / "link").is_symlink()


@given(st.from_regex(NAME, fullmatch=True))
@settings(max_examples=examples(200))
def test_every_valid_name_is_one_path_component(root: Path, name: str) -> None:
    """Every name that is valid by the rule for names is one component by the rule for paths."""
    if name not in ("link", "back"):
        assert join_parts(root, name).parent == root
        assert join_parts(root, PurePosixPath(f"topic={name}"), name).parent.parent == root


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\n", "é", "x" * 65])
def test_invalid_names_are_rejected(name: str) -> None:
    """A name with a separator, a line break, a leading dot or over 64 characters is rejected."""
    assert not NAME.fullmatch(name)


def test_root_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    assert join_parts(tmp_path / "linked", "a", "b") == tmp_path / "linked" / "a" / "b"


def test_failed_removal_is_reported(tmp_path: Path) -> None:
    """A removal reports every error that it encounters."""
    (tmp_path / "file").touch()
    with pytest.raises(RequestRefusedError, match=r"file cannot be removed \(Not a directory\)"):
        remove_below(tmp_path, "file")
    remove_below(tmp_path, "missing")


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        ("a/b", "a/b"),
        ("/a b", "/a b"),
        ("c:/a", "c:/a"),
        ("file:///a%20b", "/a b"),
        ("FILE:/a", "/a"),
        ("file://localhost/a", "/a"),
    ],
)
def test_local_folder_accepts_a_path_or_a_file_uri(named: str, folder: str) -> None:
    assert local_folder(named) == Path(folder)


@pytest.mark.parametrize(
    "named",
    ["s3a://bucket/ck", "s3://b", "gs://b/c", "abfss://c@a.example/d", "hdfs:/a", "file://host/a"],
)
def test_local_folder_refuses_a_remote_uri(named: str) -> None:
    """A remote URI is refused. Otherwise, it would create a local directory named `s3a:`."""
    with pytest.raises(InvalidRequestError) as caught:
        local_folder(named)
    assert str(caught.value).startswith(
        f"{named} is not a directory of this machine, so nothing was written; pass a path"
    )
