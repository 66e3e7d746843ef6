"""`streamqd outbox create` and `check`, and an outbox's settings, work on each real database."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streamqd import config
from streamqd.cli import cli
from streamqd.cli.outbox import choose_outbox
from streamqd.cli.session import Session
from streamqd.errors import ConfigError, DatabaseResponseError, DatabaseUnavailableError
from streamqd.outbox.database import connect
from tests.support import optional
from tests.support.databases import DatabaseServer, PostgreSQL

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command in an empty directory, so that no settings from outside take effect."""
    for name in ("STREAMQ_CONFIG", "STREAMQ_REDIS__URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *args, **options: CliRunner().invoke(cli, args, **options)


def run_all(server: DatabaseServer, url: str, statements: Iterable[str]) -> None:
    """Run statements in the same way as an administrator."""
    with contextlib.closing(server.connect(url, autocommit=True)) as connection:
        for statement in statements:
            if statement.strip():
                connection.cursor().execute(statement)


def shop(text: str, tmp_path: Path) -> Path:
    file = tmp_path / "streamq.toml"
    file.write_text(f'[[outboxes]]\nname = "shop"\n{text}\n')
    file.chmod(0o600)
    return file


def test_create_can_be_repeated_and_passes_the_check(
    invoke: Invoke, database_url: str, tmp_path: Path
) -> None:
    shop('database = "${DATABASE_URL}"', tmp_path)
    env = {"DATABASE_URL": database_url}
    missing = invoke("outbox", "check", env=env)
    assert missing.exit_code == 1
    assert "streamqd_outbox was not found; create it with" in missing.stdout
    for _ in range(2):
        created = invoke("outbox", "create", env=env)
        assert created.exit_code == 0, created.output
        assert created.stdout.startswith("the tables streamqd_outbox and streamqd_outbox_dead")
    checked = invoke("outbox", "check", "shop", "--json", env=env)
    assert checked.exit_code == 0
    assert json.loads(checked.stdout)["problems"] == []


def test_printed_statements_create_the_tables(
    invoke: Invoke, database_server: DatabaseServer, database_url: str
) -> None:
    env = {"URL": database_url}
    printed = invoke("outbox", "create", "--database", "${URL}", "--table", "box", "--sql", env=env)
    assert printed.exit_code == 0
    run_all(database_server, database_url, printed.stdout.split(";\n\n"))
    checked = invoke("outbox", "check", "--database", "${URL}", "--table", "box", env=env)
    assert checked.exit_code == 0, checked.output


def test_check_names_wrong_columns(
    invoke: Invoke, database_server: DatabaseServer, database_url: str
) -> None:
    env = {"URL": database_url}
    assert invoke("outbox", "create", "--database", "${URL}", env=env).exit_code == 0
    run_all(
        database_server,
        database_url,
        (
            "ALTER TABLE streamqd_outbox DROP COLUMN expires",
            "ALTER TABLE streamqd_outbox DROP COLUMN payload",
            "ALTER TABLE streamqd_outbox ADD COLUMN payload date",
        ),
    )
    found = invoke("outbox", "check", "--database", "${URL}", env=env)
    assert found.exit_code == 1
    assert "table streamqd_outbox has no column expires;" in found.stdout
    assert "the column payload of streamqd_outbox is date, not binary;" in found.stdout
    assert found.stdout.count("\n") == 2


FOREIGN_KEYS = {
    "postgresql": ["ALTER TABLE streamqd_outbox ALTER id DROP IDENTITY"],
    "mysql": ["ALTER TABLE streamqd_outbox MODIFY id bigint NOT NULL"],
    "sqlite": [
        "DROP TABLE streamqd_outbox",
        (
            "CREATE TABLE streamqd_outbox (id bigint PRIMARY KEY, uid text, topic text, key blob,"
            ' "partition" integer, payload blob, headers text, expires text, due_unix_ms integer,'
            " created_unix_ms integer)"
        ),
    ],
}


def test_check_finds_a_key_without_a_generated_value(
    invoke: Invoke, database_server: DatabaseServer, database_url: str
) -> None:
    """`check` finds a key whose value is not generated.

    A row whose ID is NULL would never be sent, and a row without a number never deleted.
    """
    env = {"URL": database_url}
    assert invoke("outbox", "create", "--database", "${URL}", env=env).exit_code == 0
    run_all(database_server, database_url, FOREIGN_KEYS[database_server.dialect])
    found = invoke("outbox", "check", "--database", "${URL}", env=env)
    assert found.exit_code == 1, found.output
    assert "the column id of streamqd_outbox is not a primary key that the database" in found.stdout


def test_check_accepts_a_key_with_a_sequence(
    invoke: Invoke, new_database_server: Callable[[str], DatabaseServer]
) -> None:
    server = new_database_server("postgresql")
    url = server.new()
    assert invoke("outbox", "create", "--database", url).exit_code == 0
    with contextlib.closing(server.connect(url, autocommit=True)) as connection:
        connection.execute("ALTER TABLE streamqd_outbox ALTER id DROP IDENTITY")
        connection.execute("CREATE SEQUENCE numbers")
        connection.execute(
            "ALTER TABLE streamqd_outbox ALTER id SET DEFAULT nextval('numbers'::regclass)"
        )
    found = invoke("outbox", "check", "--database", url)
    assert found.exit_code == 0, found.output


def test_check_warns_about_uids_without_a_unique_index(
    invoke: Invoke, database_server: DatabaseServer, database_url: str
) -> None:
    env = {"URL": database_url}
    sql = invoke("outbox", "create", "--database", "${URL}", "--sql", env=env).stdout
    without = sql.replace(" NOT NULL UNIQUE", " NOT NULL").split(";\n\n")
    run_all(database_server, database_url, without)
    found = invoke("outbox", "check", "--database", "${URL}", "--json", env=env)
    [note] = [each for each in json.loads(found.stdout)["notes"] if "one uid" in each]
    run_all(database_server, database_url, [note.rpartition("; run ")[2]])
    found = invoke("outbox", "check", "--database", "${URL}", env=env)
    assert found.exit_code == 0
    assert "one uid" not in found.stdout


def test_check_warns_about_asynchronous_commits(
    invoke: Invoke, new_database_server: Callable[[str], DatabaseServer]
) -> None:
    server = new_database_server("postgresql")
    url = server.new()
    assert "can lose commits" not in invoke("outbox", "create", "--database", url).stdout
    with contextlib.closing(server.connect(url, autocommit=True)) as connection:
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    found = invoke("outbox", "check", "--database", url)
    assert found.exit_code == 0
    assert "synchronous_commit is off for this user, so a crash" in found.stdout
    server = new_database_server("mysql")  # this server has innodb_flush_log_at_trx_commit = 0
    found = invoke("outbox", "create", "--database", server.new())
    assert "innodb_flush_log_at_trx_commit is 0 for this user" in found.stdout


@pytest.mark.parametrize("database_server", ["mysql"], indirect=True)
def test_check_refuses_a_table_without_transactions(
    invoke: Invoke, database_server: DatabaseServer, database_url: str
) -> None:
    env = {"URL": database_url}
    assert invoke("outbox", "create", "--database", "${URL}", env=env).exit_code == 0
    with contextlib.closing(database_server.connect(database_url)) as connection:
        connection.cursor().execute("ALTER TABLE streamqd_outbox ENGINE=MyISAM")
    found = invoke("outbox", "check", "--database", "${URL}", env=env)
    assert found.exit_code == 1
    assert "run ALTER TABLE streamqd_outbox ENGINE=InnoDB" in found.stdout


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_check_names_missing_database_permissions(
    invoke: Invoke, database_server: PostgreSQL, database_url: str
) -> None:
    with contextlib.closing(database_server.connect(database_url, autocommit=True)) as owner:
        owner.execute("CREATE ROLE relay LOGIN")
    env = {"URL": database_url.replace("postgres@", "relay@")}
    refused = invoke("outbox", "create", "--database", "${URL}", env=env)
    assert refused.exit_code == 4
    assert "was not created (permission denied for schema public" in refused.stderr
    assert "run the output of `streamqd outbox create --sql` as its owner" in refused.stderr
    invoke("outbox", "create", "--database", "${URL}", env={"URL": database_url})
    found = invoke("outbox", "check", "--database", "${URL}", env=env)
    assert found.exit_code == 1
    assert "permission denied for table streamqd_outbox" in found.stdout
    assert "grant SELECT and DELETE" in found.stdout
    with contextlib.closing(database_server.connect(database_url, autocommit=True)) as owner:
        owner.execute("GRANT SELECT, DELETE ON streamqd_outbox TO relay")
        owner.execute("GRANT SELECT, INSERT ON streamqd_outbox_dead TO relay")
    found = invoke("outbox", "check", "--database", "${URL}", env=env)
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("database_server", ["postgresql"], indirect=True)
def test_check_warns_about_a_missing_trigger(invoke: Invoke, database_url: str) -> None:
    env = {"URL": database_url}
    created = invoke("outbox", "create", "--database", "${URL}", "--no-notify", env=env)
    assert "no trigger notifies the relay" in created.stdout
    created = invoke("outbox", "create", "--database", "${URL}", env=env)
    assert "a trigger notifies the relay" in created.stdout


@pytest.mark.parametrize("database_server", ["postgresql", "mysql"], indirect=True)
def test_unknown_database_error_names_the_remedy(database_url: str) -> None:
    name = database_url.rpartition("?")[0].rpartition("/")[2]
    with pytest.raises(DatabaseResponseError, match="create the database, or correct the URL"):
        connect(database_url.replace(f"/{name}?", "/absent?"))


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("postgresql://u:secret@127.0.0.1:1/x", marks=optional.need("psycopg")),
        pytest.param("mysql://u:secret@127.0.0.1:1/x", marks=optional.need("pymysql")),
    ],
)
def test_missing_server_error_hides_the_password(url: str) -> None:
    with pytest.raises(DatabaseUnavailableError, match="cannot be reached") as unavailable:
        connect(url)
    assert not isinstance(unavailable.value, DatabaseResponseError)
    assert "secret" not in str(unavailable.value)
    assert "\n" not in str(unavailable.value)


def test_missing_sqlite_file_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "absent.db"
    with pytest.raises(DatabaseResponseError, match="streamqd outbox create"):
        connect(f"sqlite:///{path}")
    assert not path.exists()


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "outboxes[0].database: is missing"),
        ('database = "redis://x"', "outboxes[0].database: must start with postgresql://"),
        ('database = "sqlite://x/y"', "outboxes[0].database: must name a file"),
        ('database = "mysql://u@h"', "outboxes[0].database: must name a database"),
        ('database = "sqlite:///x"\ntable = "a-b"', 'outboxes[0].table: "a-b" is not valid'),
        ('database = "sqlite:///x"\npassword_file = "p"', "cannot be used with SQLite"),
        (
            'database = "mysql://u:secret@h/x"\npassword_file = "p"',
            "contains a password, but password_file is also set",
        ),
        ('database = "sqlite:///x"\nbatch = 0', "outboxes[0].batch: 0 is too small"),
        (
            'database = "sqlite:///x"\n[[outboxes]]\nname = "shop"\ndatabase = "sqlite:///y"',
            "is already the name of outboxes[0]",
        ),
        (
            'database = "sqlite:///x"\n[[outboxes]]\nname = "b"\ndatabase = "sqlite:///x"',
            "outboxes[1].table: is already the table of outboxes[0]",
        ),
        (
            (
                'database = "mysql://u@localhost/x"\n[[outboxes]]\nname = "b"\n'
                'database = "mariadb://v@127.0.0.1:3306/x"'
            ),
            "outboxes[1].table: is already the table of outboxes[0]",
        ),
    ],
)
def test_invalid_outbox_settings_are_reported_without_secrets(
    text: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "p").write_text("secret")
    (tmp_path / "p").chmod(0o600)
    with pytest.raises(ConfigError) as refused:
        config.load(shop(text, tmp_path), environ={})
    assert problem in str(refused.value)
    assert "secret" not in str(refused.value)


def test_readable_config_file_must_not_contain_a_password(tmp_path: Path) -> None:
    file = shop('database = "postgresql://u:secret@h/x"', tmp_path)
    assert config.load(file, environ={}).outboxes[0].url() == "postgresql://u:secret@h/x"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="contains a password, but other users may read"):
        config.load(file, environ={})
    file = shop('database = "postgresql://u:${PW}@h/x"', tmp_path)
    file.chmod(0o644)
    loaded = config.load(file, environ={"PW": "secret"})
    assert loaded.outboxes[0].url({"PW": "secret"}) == "postgresql://u:secret@h/x"


def test_outbox_commands_mask_the_password(invoke: Invoke, tmp_path: Path) -> None:
    file = shop('database = "postgresql://u:secret@h/x"', tmp_path)
    shown = invoke("config", "show")
    assert "postgresql://u:***@h/x" in shown.stdout
    assert "secret" not in shown.stdout
    assert "secret" not in repr(config.load(file, environ={}))


def test_missing_variable_is_reported_when_it_is_used(invoke: Invoke, tmp_path: Path) -> None:
    loaded = config.load(shop('database = "${DATABASE_URL}"', tmp_path), environ={})
    assert (
        loaded.outboxes[0]
        .fault({})
        .startswith("database of outbox shop: environment variable DATABASE_URL is not set")
    )
    found: Any = invoke("outbox", "check")
    assert found.exit_code == 8
    assert found.stderr.startswith(
        "Error: database of outbox shop: environment variable DATABASE_URL"
    )


def test_password_is_read_from_a_systemd_credential(tmp_path: Path) -> None:
    (tmp_path / "outbox-shop-password").write_text("from systemd\n")
    loaded = config.load(shop('database = "mysql://u@h/x"', tmp_path), environ={})
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert loaded.outboxes[0].password(environ) == "from systemd"


def test_relative_sqlite_file_is_next_to_the_config_file(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20"
    folder.mkdir()
    loaded = config.load(shop('database = "sqlite:///x.db"', folder), environ={})
    with connect(loaded.outboxes[0].url(), create=True):
        assert (folder / "x.db").exists()


def test_outbox_name_of_the_command_line_is_stable(tmp_path: Path) -> None:
    shop(f'database = "sqlite:///{tmp_path}/shop.db"', tmp_path)
    session = Session(tmp_path / "streamq.toml")

    def name(url: str, table: str | None = None) -> str:
        return choose_outbox(session, None, url, table).name

    assert name(f"sqlite:///{tmp_path}/shop.db") == "shop"
    assert name(f"sqlite:///{tmp_path}/./shop.db") == "shop"
    other = name(f"sqlite:///{tmp_path}/other.db")
    assert other == name(f"sqlite:///{tmp_path}/other.db")
    assert len({"shop", other, name(f"sqlite:///{tmp_path}/shop.db", "box")}) == 3
