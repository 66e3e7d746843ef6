"""A directory of checkpoints belongs to one query and one run at a time. No test needs a JVM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from streamqd import config
from streamqd.cli import cli
from streamqd.errors import RequestRefusedError
from streamqd.spark.pipelines.checkpoints import bind_query, lease_checkpoints
from streamqd.store.client import Connection
from tests.support.servers import Server


def test_checkpoint_is_locked_under_any_path(
    server: Server, link: Connection, tmp_path: Path
) -> None:
    link.execute("PING")
    settings = replace(config.Settings(), redis=server.settings)
    (tmp_path / "same").symlink_to(tmp_path / "one")
    with lease_checkpoints(settings, tmp_path / "one"):
        with pytest.raises(RequestRefusedError, match="same is in use by process"):
            lease_checkpoints(settings, tmp_path / "same").__enter__()
        with lease_checkpoints(settings, tmp_path / "other"):
            pass
    with lease_checkpoints(settings, tmp_path / "same"):
        pass


def test_checkpoint_refuses_another_query(tmp_path: Path) -> None:
    query = {"query": "SELECT 1", "mode": "append"}
    bind_query(tmp_path, query)
    bind_query(tmp_path, query)
    with pytest.raises(
        RequestRefusedError, match="of another query, whose mode is 'append'; choose another"
    ):
        bind_query(tmp_path, query | {"mode": "update"})
    sign = tmp_path / "_checkpoints.json"
    sign.write_text("half")
    with pytest.raises(RequestRefusedError, match=r"cannot be read \(delete it"):
        bind_query(tmp_path, query)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--follow"], "require --stream"),
        (["--to-topic", "x"], "require --stream"),
        (["--stream", "--archive", "x"], "reads Redis only"),
        (["--stream", "--to-topic", "x"], "--to-topic requires --checkpoint"),
        (["--into", "x"], "require --stream"),
        (["--stream", "--into", "x"], "--into requires --archive"),
        (["--stream", "--into", "x", "-a", "y"], "--into requires --checkpoint"),
        (
            ["--stream", "--into", "x", "-a", "y", "--checkpoint", "z", "--to-topic", "t"],
            "cannot be",
        ),
        (
            ["--stream", "--into", "x", "-a", "y", "--checkpoint", "z", "--mode", "update"],
            "--into cannot be used with --mode update",
        ),
        (["--stream", "--mode", "complete"], "Invalid value for '--mode'"),
    ],
)
def test_pipeline_sql_rejects_conflicting_options(arguments: list[str], said: str) -> None:
    ended = CliRunner().invoke(cli, ["pipeline", "sql", "SELECT 1", *arguments])
    assert ended.exit_code == 2
    assert said in ended.output
