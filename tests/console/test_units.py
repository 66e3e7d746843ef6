"""The Kubernetes example and the systemd unit start a console that works as they state."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import optional
from tests.support.console import ConsoleProcess
from tests.support.daemon import ROOT, toml

pytestmark = [optional.need("starlette"), pytest.mark.slow]

from tests.console.conftest import PASSWORD  # noqa: E402
from tests.console.test_access import OWN, Client  # noqa: E402

MANIFEST = ROOT / "etc" / "kubernetes" / "console.yaml"
UNIT = ROOT / "systemd" / "streamqd-console.service"


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the secrets, which contains a password for Redis."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "redis-password").write_text("secret")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))
    return folder


def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def mounts(container: dict[str, Any]) -> dict[str, str]:
    return {each["mountPath"]: each["name"] for each in container["volumeMounts"]}


def test_kubernetes_objects_reference_each_other():
    found = documents()
    template = found["Deployment"]["spec"]["template"]
    pod = template["spec"]
    console, proxy = pod["containers"]
    settings = tomllib.loads(found["ConfigMap"]["data"]["streamq.toml"])
    flags = dict(each.removeprefix("--").split("=", 1) for each in proxy["args"])
    header = MANIFEST.read_text().partition("\napiVersion")[0]

    assert flags["upstream"] == f"http://{settings['console']['bind']}"
    assert flags["pass-user-headers"] == "true"  # this flag makes the proxy send X-Forwarded-Email
    assert settings["console"]["proxy_header"] == "X-Forwarded-Email"
    [port] = proxy["ports"]
    assert flags["http-address"] == f"0.0.0.0:{port['containerPort']}"
    assert "ports" not in console, "only the proxy is reachable"
    [exposed] = found["Service"]["spec"]["ports"]
    assert exposed["targetPort"] == port["name"]
    labels = template["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Deployment"]["spec"]["replicas"] == 1, "sessions are in its memory"
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert {*mounts(console).values(), *mounts(proxy).values()} == set(volumes)
    assert volumes["config"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    # The commands in its header create the secrets from the files that the console reads.
    for name, folder, files in (
        ("credentials", console["env"][0]["value"], ["redis-password"]),
        ("proxy", "/run/secrets/proxy", ["client-secret", "cookie-secret"]),
    ):
        secret = volumes[name]["secret"]["secretName"]
        assert name in (mounts(console) | mounts(proxy))[folder]
        assert f"kubectl create secret generic {secret} " in header
        assert [each for each in files if f"--from-file={each}" not in header] == []
    for name in ("client-secret", "cookie-secret"):
        assert flags[f"{name}-file"] == f"/run/secrets/proxy/{name}"
    for each in (console, proxy):
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in each["resources"]["limits"]


def test_kubernetes_console_accepts_the_names_of_its_proxy(tmp_path, credentials):
    """The example's command line and file start a console, which sends a page without Redis."""
    found = documents()
    console, _ = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    first, config_path, command, *options = console["args"]
    assert (first, command) == ("--config", "console")
    folder, name = config_path.rsplit("/", 1)
    assert mounts(console)[folder] == "config"
    assert name in found["ConfigMap"]["data"]
    path = tmp_path / name
    path.write_text(found["ConfigMap"]["data"][name].replace("//redis:6379", "//127.0.0.1:1"))

    with ConsoleProcess(path, *options) as started:
        assert started.first_line == f"console: http://127.0.0.1:{started.port}/", "no token"
        named = Client(started.port).get("/", **{"X-Forwarded-Email": "petra@example.com"})
        unknown = Client(started.port).get("/")
        assert started.stop() == 0

    assert (named.status, unknown.status) == (503, 401)
    assert "petra@example.com" in named.text
    assert "Redis does not answer" in named.text
    assert "secret" not in named.text


def test_systemd_console_reads_its_users_as_a_credential(tmp_path, credentials, users_file):
    lines = UNIT.read_text().splitlines()
    values = dict(each.split("=", 1) for each in lines if "=" in each and each[0] not in "# ")
    program, first, _, command, *options = shlex.split(values["ExecStart"])
    assert (program.rpartition("/")[2], first, command) == ("streamqd", "--config", "console")
    text = UNIT.read_text()
    assert "LoadCredential=console-users:/etc/streamqd/console-users" in text
    setting = 'users_file = "/run/credentials/streamqd-console.service/console-users"'
    assert setting in text
    file = credentials / "console-users"
    file.write_text(users_file.read_text())
    file.chmod(0o440)  # the mode that systemd gives a unit's credentials if User= is set
    path = tmp_path / "console.toml"
    redis = {"url": "redis://127.0.0.1:1/0", "username": "streamqd-admin"}
    path.write_text(toml({"redis": redis, "console": {"users_file": str(file)}}))

    with ConsoleProcess(path, *options) as started:
        client = Client(started.port)
        answer = client.post("/login", {"name": "vera", "password": PASSWORD}, OWN)
        assert (answer.status, client.get("/").status) == (303, 503)
        assert started.stop() == 0
