"""Files and endpoints that other users could read or change are refused, and secrets are masked."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from streamqd import config, handlers, logs
from streamqd.config import secrets, topology
from streamqd.errors import ConfigError
from streamqd.handlers.outcomes import describe_failure
from streamqd.handlers.probing import examine
from streamqd.logs import JsonFormatter

URL = "redis://me:s3cret@localhost:6379/0"
NOTHING: dict[str, str] = {}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "streamq.toml"


def load(file: Path, text: str, environ: dict[str, str] = NOTHING) -> config.Settings:
    file.write_text(text)
    return config.load(file, {}, environ)


def problem(file: Path, text: str, environ: dict[str, str] = NOTHING) -> str:
    with pytest.raises(ConfigError) as raised:
        load(file, text, environ)
    (only,) = raised.value.problems
    return only


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://cache:6379/0", "cache"),
        ("redis://10.0.0.5", "10.0.0.5"),
        ("redis://[2001:db8::1]:6379", "2001:db8::1"),
        ("redis://127.0.0.1.example.com", "127.0.0.1.example.com"),
        ("redis://localhost.example.com", "localhost.example.com"),
        ("redis+sentinel://127.0.0.1:26379,b:26379/mymaster", "b"),
        ("redis+cluster://a:7000", "a"),
    ],
)
def test_redis_on_another_host_requires_tls_or_permission(file: Path, url: str, named: str) -> None:
    found = problem(file, f'[redis]\nurl = "{url}"')
    assert found.startswith(f"redis.url: {named} is another host")
    stated = load(file, f'[redis]\nurl = "{url}"\nallow_insecure = true')
    assert stated.redis.url == url


@pytest.mark.parametrize(
    "url",
    [
        "embedded:",
        "redis://localhost",
        "redis://127.9.9.9:1/2",
        "redis://[::1]",
        "rediss://cache",
        "unix:///run/redis.sock",
        "redis+cluster://127.0.0.1:7000,localhost:7001",
        "rediss+cluster://a:7000",
    ],
)
def test_local_and_tls_addresses_need_no_allow_insecure(file: Path, url: str) -> None:
    assert load(file, f'[redis]\nurl = "{url}"').redis.url == url


def test_http_endpoint_for_other_hosts_requires_a_token(file: Path, tmp_path: Path) -> None:
    public = '[http]\nbind = "0.0.0.0:9464"\n'
    assert problem(file, public).startswith("http.bind: any client that reaches this address could")
    assert load(file, public + "allow_public = true").http.allow_public
    token = tmp_path / "token"
    token.write_text("t0ken")
    token.chmod(0o644)
    assert "chmod 600" in problem(file, public + 'token_file = "token"')
    token.chmod(0o600)
    settings = load(file, public + 'token_file = "token"')
    assert config.token_path(settings.http, NOTHING) == token
    assert config.warnings(settings) == []
    (tmp_path / "http-token").write_text("t0ken")
    given = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert config.token_path(load(file, public, given).http, given) == tmp_path / "http-token"
    for inner in ("127.0.0.1:9464", "localhost:1", "[::1]:9464", "unix:http.sock", ""):
        load(file, f'[http]\nbind = "{inner}"')


# --- secrets --------------------------------------------------------------------------------------


def test_secret_file_of_another_user_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(secret, 1000, -1)
    owner = secret.stat().st_uid
    text = '[redis]\nurl = "redis://localhost"\npassword_file = "secret"'
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "does not belong to the daemon's user" in problem(file, text)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    load(file, text)


def test_settings_do_not_show_passwords() -> None:
    settings = config.Settings(redis=config.Redis(url=URL))
    for text in (repr(settings), str(settings.redis), f"{settings}", repr((settings,))):
        assert "s3cret" not in text
        assert "redis://me:***@localhost" in text
    stored = config.ArchiveStore('{"aws_secret_access_key": "s3cret"}')
    assert "s3cret" not in f"{config.Settings(archive=stored)} {stored}"
    nodes = topology.parse("redis+sentinel://me:s3cret@a:1/mymaster")
    assert "s3cret" not in f"{nodes} {nodes!r}"


def test_logs_do_not_show_passwords() -> None:
    error = RuntimeError(f"cannot reach {URL}: no")
    try:
        raise error
    except RuntimeError:
        info = (RuntimeError, error, error.__traceback__)
    record = logging.LogRecord("app", logging.ERROR, __file__, 1, "at %s", (URL,), info)
    for formatter in (JsonFormatter(), logs.TextFormatter()):
        assert "s3cret" not in formatter.format(record)
    record = logging.LogRecord("streamqd", logging.ERROR, __file__, 1, "", (), None)
    record.event, record.fields = "redis.lost", {"error": error, "urls": [URL], "url": URL.encode()}
    for formatter in (JsonFormatter(), logs.TextFormatter()):
        assert "s3cret" not in formatter.format(record)
        assert "***" in formatter.format(record)


def test_dead_letters_do_not_show_passwords() -> None:
    try:
        raise RuntimeError(f"cannot reach {URL}: no")
    except RuntimeError as error:
        failure = describe_failure(error, "traceback")
    assert "s3cret" not in failure.message + failure.traceback
    assert "redis://me:***@localhost" in failure.message
    assert failure.traceback


def test_child_environment_has_no_password() -> None:
    environ = {"STREAMQ_REDIS__URL": URL, "STREAMQ_URL": "redis://:p@h", "DATABASE_URL": URL}
    environ["STREAMQ_ARCHIVE__OPTIONS"] = '{ aws_secret_access_key = "s3cret" }'
    secrets.scrub(environ)
    assert environ == {
        "STREAMQ_REDIS__URL": "redis://me@localhost:6379/0",
        "STREAMQ_URL": "redis://@h",
        "DATABASE_URL": URL,
    }


def test_password_in_the_environment_causes_a_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(file, "")
    monkeypatch.setenv("STREAMQ_REDIS__URL", URL)
    (found,) = config.warnings(settings)
    assert found.startswith("redis.url: its password is in the environment")
    assert "s3cret" not in found


@pytest.mark.parametrize("text", ["a" * 200_000, "://" * 60_000, "redis://a:" + "b" * 200_000])
def test_masking_takes_linear_time(text: str) -> None:
    """Masking takes linear time.

    Without bounds in its pattern, it would take minutes, and this test would time out.
    """
    for each in (text, f"{text}://", f"password={text}"):
        config.mask_passwords(each)


# --- code -----------------------------------------------------------------------------------------


def test_code_writable_by_all_users_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    # The declarations of other test modules must not appear here.
    monkeypatch.setattr("streamqd.handlers.probing.declared", [])
    module = tmp_path / "opened.py"
    module.write_text("def handle(msg): ...\n")
    assert examine([], ["opened:handle"], tmp_path).problems == []
    for path, mode in ((module, 0o666), (tmp_path, 0o777), (tmp_path, 0o1777)):
        before = path.stat().st_mode
        path.chmod(mode)
        (found,) = examine(["opened"], ["opened:handle"], tmp_path).problems
        assert found == f"any user may write {path}, and it is code to run: chmod o-w {path}"
        path.chmod(before)
    assert handlers.probe([], ["opened:handle"], tmp_path, 30.0).problems == []


def test_running_as_root_logs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "runs as root" in "".join(config.root_warnings())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert config.root_warnings() == []


def test_log_record_with_newlines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    forged = 'x\n{"event":"daemon.ready"}\r\x1b[2J\u2028y\x00'
    record = logging.LogRecord("app", logging.ERROR, __file__, 1, "%s", (forged,), None)
    record.event, record.fields = "redis.lost", {"error": forged, "key": forged.encode()}
    for formatter in (JsonFormatter(), logs.TextFormatter()):
        line = formatter.format(record)
        assert line.isprintable()
    shown = json.loads(JsonFormatter().format(record))
    assert shown["event"] == "redis.lost"
