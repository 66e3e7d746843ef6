"""The files for operators (units, alert rules, dashboard, image, manifests) and the watchdog."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

from streamqd import config, logs
from streamqd.admin import as_json
from streamqd.admin.diagnosis.host import STOP_MARGIN_SECONDS
from streamqd.admin.scaling import GroupScale, ScaleView
from streamqd.cli import cli
from streamqd.cli.init import shipped_unit
from streamqd.cli.scale import scale
from streamqd.config.values import parse_duration
from streamqd.housekeeper.health import HOUSEKEEPER_SECONDS, SUPERVISOR_SECONDS
from streamqd.metrics.table import METRICS
from streamqd.model import Assignment
from streamqd.notify import Notifier
from streamqd.scoreboard import Scoreboard, now_ns
from streamqd.supervisor.drain import RELEASE_SECONDS
from streamqd.supervisor.report import EXTEND_EVERY, EXTEND_SECONDS, StatusReporter
from tests.support.loglines import LogLines

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "etc" / "alerts.yml"
ALERT_TESTS = ROOT / "etc" / "alerts_test.yml"
DASHBOARD = ROOT / "etc" / "grafana.json"


# --- the watchdog ---------------------------------------------------------------------------------


class Watched:
    """A watchdog whose datagrams the test reads, like a service manager."""

    def __init__(self, folder: Path) -> None:
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._end.bind(str(folder / "notify"))
        self._end.setblocking(False)
        self.board = Scoreboard(4)
        environ = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "1"}
        self.report = StatusReporter(self.board, Notifier(environ))

    def tick(self, *, draining: bool = False, redis_ok: bool = True, seen: bool = True) -> str:
        """Make one tick. Return the datagrams that it sent."""
        self.report.tick({}, redis_ok=redis_ok, fleet_seen=seen, draining=draining, paused=False)
        said = []
        while True:
            try:
                said.append(self._end.recv(4096).decode())
            except BlockingIOError:
                return "\n".join(said)

    def close(self) -> None:
        self._end.close()


@pytest.fixture
def watched_supervisor(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def test_watchdog_requires_progress_of_both_processes(watched_supervisor: Watched) -> None:
    assert "WATCHDOG=1" in watched_supervisor.tick()  # the housekeeper has not started yet
    watched_supervisor.board.housekeeper_progress_ns = now_ns()
    assert "WATCHDOG=1" in watched_supervisor.tick()

    watched_supervisor.board.housekeeper_progress_ns = now_ns() - int(
        (HOUSEKEEPER_SECONDS + 1) * 1e9
    )
    assert "WATCHDOG=1" not in watched_supervisor.tick()

    watched_supervisor.board.housekeeper_progress_ns = now_ns()
    assert "WATCHDOG=1" in watched_supervisor.tick()


def test_watchdog_is_fed_while_redis_is_down(watched_supervisor: Watched) -> None:
    said = watched_supervisor.tick(redis_ok=False)

    assert "WATCHDOG=1" in said
    assert "Redis does not answer" in said


def test_timeout_is_extended_only_during_start_and_drain(watched_supervisor: Watched) -> None:
    word = f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1e6:.0f}"
    assert word in watched_supervisor.tick(seen=False)
    assert word not in watched_supervisor.tick(seen=False)  # not every tick sends it
    assert "READY=1" in watched_supervisor.tick()
    watched_supervisor.report._extend_at = 0.0
    assert word not in watched_supervisor.tick()
    assert word in watched_supervisor.tick(draining=True)
    assert EXTEND_SECONDS > 2 * EXTEND_EVERY


def test_timeout_is_not_extended_without_progress(watched_supervisor: Watched) -> None:
    watched_supervisor.tick()
    watched_supervisor.report._extend_at = 0.0
    watched_supervisor.board.housekeeper_progress_ns = now_ns() - int(
        (HOUSEKEEPER_SECONDS + 1) * 1e9
    )

    assert "EXTEND_TIMEOUT_USEC" not in watched_supervisor.tick(draining=True)


# --- the service units ----------------------------------------------------------------------------


def unit_settings(text: str) -> list[str]:
    """Return the settings of a unit, except for those that an installation adapts."""
    before, _, rest = text.partition("# ---- adapt from here ")
    after = rest.partition("# ---- to here ")[2]
    lines = (before + after).splitlines()
    return [line for line in lines if "=" in line and not line.startswith(("#", "Description="))]


def unit_value(text: str, name: str) -> str:
    [value] = [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]
    return value


def test_shipped_units_match_their_template(tmp_path: Path) -> None:
    shipped = shipped_unit()
    template = (ROOT / "systemd" / "streamqd@.service").read_text()

    assert (ROOT / "systemd" / "streamqd.service").read_text() == shipped
    assert unit_settings(template) == unit_settings(shipped)
    assert "%i" in template


# --- alert rules and dashboard --------------------------------------------------------------------


def exposed_metrics() -> dict[str, set[str]]:
    """Return the names under which Prometheus stores the metrics, with their labels."""
    found = {}
    for metric in METRICS:
        labels = {*metric.labels, "job", "instance"}
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{end}": labels for end in ("sum", "count")}
            found[f"{metric.name}_bucket"] = labels | {"le"}
        else:
            found[metric.name] = labels
    return found


def alert_expressions() -> dict[str, str]:
    """Return the expression of each alert as text. Only promtool parses the file as a whole."""
    found = {}
    for block in ALERTS.read_text().split("- alert: ")[1:]:
        name = block.split("\n", 1)[0]
        expression = re.search(r"expr: (.*?)\n +(?:for|labels):", block, re.DOTALL)
        assert expression, name
        found[name] = expression[1]
    return found


def dashboard_expressions() -> dict[str, str]:
    found = {}
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert query, variable["name"]
            found[f"${variable['name']}"] = f"sum by ({query[2]}) ({query[1]})"
    return found


EXPRESSIONS = [*alert_expressions().items(), *dashboard_expressions().items()]


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS, ids=[one for one, _ in EXPRESSIONS])
def test_alert_rules_and_dashboard_use_existing_metrics(place: str, expression: str) -> None:
    metrics = exposed_metrics()
    named = set(re.findall(r"\bstreamqd_\w+", expression)) - {"streamqd_instance"}  # a label
    if place != "StreamqdDown":
        assert named
    assert named <= metrics.keys()

    known = set().union(*(metrics[name] for name in named)) | {"job", "instance"}
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)
    assert {label.strip() for labels in grouped for label in labels.split(",")} <= known
    for metric, selector in re.findall(r"(streamqd_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=~?\"", selector)) <= metrics[metric]
    assert set(selected) <= known


def test_alert_labels_exist_in_the_metrics() -> None:
    for block in ALERTS.read_text().split("- alert: ")[1:]:
        name = block.split("\n", 1)[0]
        expression = alert_expressions()[name]
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression))))
        if not kept:
            found = re.findall(r"\bstreamqd_\w+", expression)
            kept = set().union(*(exposed_metrics()[one] for one in found), {"instance"})
        assert set(re.findall(r"\$labels\.(\w+)", block)) <= kept, name


def test_every_alert_is_tested_and_explained() -> None:
    page = (ROOT / "docs" / "how-to" / "monitor-and-alert.md").read_text()
    tests = ALERT_TESTS.read_text()
    names = alert_expressions().keys()

    assert len(names) > 10
    assert [name for name in names if f"alertname: {name}\n" not in tests] == []
    assert [name for name in names if f"`{name}`" not in page] == []
    assert set(re.findall(r"Streamqd\w+", page)) <= names


def test_dashboard_panels_and_variables_are_complete() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    variables = {one["name"] for one in board["templating"]["list"]}

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == variables


@pytest.mark.slow
@pytest.mark.fault("F29")
@pytest.mark.parametrize("what", [("check", ALERTS), ("test", ALERT_TESTS)], ids=["check", "test"])
def test_promtool_accepts_the_alert_rules(what: tuple[str, Path]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    command = [promtool, what[0], "rules", str(what[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(streamqd_\w+)` \| (\w+) \|", page, re.MULTILINE))

    assert rows == {metric.name: metric.kind for metric in METRICS}


# --- log lines caused by messages -----------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the limits. `clock[0]` is the current time."""
    now = [1000.0]
    monkeypatch.setattr("streamqd.logs.time.monotonic", lambda: now[0])
    return now


def test_flood_of_log_lines_is_suppressed_and_counted(clock: list[float]) -> None:
    with LogLines() as lines:
        limit = logs.Limit("message.dead_lettered", logging.WARNING, per_second=3)
        for number in range(10):
            limit.event(uid=f"a/0/{number}-0")
        clock[0] += 0.9
        limit.event(uid="a/0/10-0")
        assert [one["uid"] for one in lines.all()] == ["a/0/0-0", "a/0/1-0", "a/0/2-0"]

        clock[0] += 0.1
        limit.event(uid="a/0/11-0")
        limit.event(uid="a/0/12-0")
        told = [(one["uid"], one.get("suppressed")) for one in lines.all()[3:]]

    assert told == [("a/0/11-0", 8), ("a/0/12-0", None)]


def test_suppressed_count_is_logged_without_another_line(clock: list[float]) -> None:
    with LogLines() as lines:
        limit = logs.Limit("message.dead_lettered", logging.WARNING, per_second=2)
        for _ in range(5):
            limit.event(uid="a/0/1-0")
        limit.catch_up(assignment=Assignment("a", 0, "g"))
        assert len(lines.all()) == 2

        clock[0] += 1.0
        limit.catch_up(assignment=Assignment("a", 0, "g"))
        limit.catch_up(assignment=Assignment("a", 0, "g"))
        # The line that reports the suppressed lines counts toward this second as well.
        limit.event(uid="a/0/2-0")
        limit.event(uid="a/0/3-0")
        told = [(one.get("uid"), one.get("suppressed")) for one in lines.all()[2:]]

    assert told == [(None, 3), ("a/0/2-0", None)]


def test_suppressed_line_checked_first_is_counted(clock: list[float]) -> None:
    with LogLines() as lines:
        limit = logs.Limit("message.dead_lettered", logging.WARNING, per_second=2)
        for number in range(5):
            if not limit.is_suppressed():
                limit.event(uid=f"a/0/{number}-0")
        clock[0] += 1.0
        assert not limit.is_suppressed()
        limit.event(uid="a/0/5-0")
        told = [(one["uid"], one.get("suppressed")) for one in lines.all()]

    assert told == [("a/0/0-0", None), ("a/0/1-0", None), ("a/0/5-0", 3)]


def test_suppressed_lines_below_the_level_are_not_counted(clock: list[float]) -> None:
    with LogLines() as lines:
        logging.getLogger("streamqd").setLevel("INFO")
        limit = logs.Limit("message.retried", logging.DEBUG, per_second=1)
        for _ in range(5):
            limit.event()
            assert limit.is_suppressed()
        clock[0] += 5.0
        limit.catch_up()
        assert lines.all() == []


# --- image and manifests --------------------------------------------------------------------------

KUBERNETES = ROOT / "etc" / "kubernetes"
DOCKER = ROOT / "etc" / "docker"
AFTER_DRAIN = RELEASE_SECONDS + 2.0 + 10.0  # seconds: release, housekeeper, embedded server


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def seconds(text: str) -> float:
    return parse_duration(text)


@pytest.fixture
def defaults() -> config.Settings:
    return config.load(None)


def test_doctor_and_pages_agree_on_the_stop_timeout() -> None:
    assert STOP_MARGIN_SECONDS == AFTER_DRAIN
    assert f"plus {AFTER_DRAIN:.0f} seconds" in (ROOT / "docs/reference/signals.md").read_text()


def test_systemd_timeouts_exceed_drain_and_boot(defaults: config.Settings) -> None:
    for name in ("streamqd.service", "streamqd@.service"):
        assignment = (ROOT / "systemd" / name).read_text()
        assert (
            float(unit_value(assignment, "TimeoutStopSec"))
            > defaults.daemon.drain_timeout + AFTER_DRAIN
        )
        assert (
            float(unit_value(assignment, "TimeoutStartSec")) > defaults.daemon.boot_timeout + 30.0
        )
        # A tick may wait several seconds for Redis, so several ticks must fit into the interval.
        assert float(unit_value(assignment, "WatchdogSec")) >= 2 * SUPERVISOR_SECONDS


def test_kubernetes_timeouts_exceed_drain_and_boot(defaults: config.Settings) -> None:
    settings, deployment, *_ = documents(KUBERNETES / "streamqd.yaml")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    toml = tomllib.loads(settings["data"]["streamq.toml"])
    drain = seconds(toml["daemon"]["drain_timeout"])

    assert drain == defaults.daemon.drain_timeout
    assert pod["terminationGracePeriodSeconds"] > drain + AFTER_DRAIN
    assert "lifecycle" not in container
    startup = container["startupProbe"]
    patience = startup["periodSeconds"] * startup["failureThreshold"]
    assert patience > defaults.daemon.boot_timeout + 30.0
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/startupz",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    [port] = container["ports"]
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    assert toml["http"]["bind"] == f"0.0.0.0:{port['containerPort']}"
    # Two readings of the same instance may disagree, but not for longer than until the next probe.
    assert all(probe["timeoutSeconds"] <= probe["periodSeconds"] for probe in probes.values())


def test_kubernetes_pod_has_minimal_permissions() -> None:
    _, deployment, budget, policy = documents(KUBERNETES / "streamqd.yaml")
    [monitor] = documents(KUBERNETES / "podmonitor.yaml")
    template = deployment["spec"]["template"]
    pod = template["spec"]
    [container] = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    assert "cpu" not in container["resources"]["limits"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    labels = template["metadata"]["labels"]
    for other in (deployment, budget, monitor):
        assert other["spec"]["selector"]["matchLabels"] == labels
    assert deployment["spec"]["replicas"] > budget["spec"]["maxUnavailable"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    [scrape] = policy["spec"]["ingress"]
    assert scrape["ports"] == [{"protocol": "TCP", "port": container["ports"][0]["name"]}]
    assert "from" in scrape, "the HTTP endpoint is not for every pod of the cluster"


def test_kubernetes_configuration_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, deployment, *_ = documents(KUBERNETES / "streamqd.yaml")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    path = tmp_path / "streamq.toml"
    path.write_text(settings["data"]["streamq.toml"])
    environ = {one["name"]: one.get("value", "streamqd-1") for one in container["env"]}
    (tmp_path / "http-token").write_text("token")  # a file of the mounted secret
    assert environ["CREDENTIALS_DIRECTORY"] in {
        mount["mountPath"] for mount in container["volumeMounts"]
    }
    environ["CREDENTIALS_DIRECTORY"] = str(tmp_path)

    loaded = config.load(path, environ=environ)

    assert loaded.daemon.instance == "streamqd-1"
    state = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(loaded.daemon.state_dir) in state


def scaling_manifests() -> dict[str, Any]:
    """Return the manifests for KEDA, by their kind."""
    return {each["kind"]: each for each in documents(KUBERNETES / "scaledobject.yaml")}


@pytest.mark.parametrize("kind", ["ScaledObject", "TriggerAuthentication"])
def test_manifests_for_keda_match_its_schema(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    known = json.loads((ROOT / "tests" / "support" / "keda" / "crds.json").read_text())["kinds"][
        kind
    ]
    manifest = scaling_manifests()[kind]

    assert manifest["apiVersion"] == known["apiVersion"]
    jsonschema.validate(manifest["spec"], known["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest["spec"] | {"frog": 1}, known["spec"])


def test_keda_reads_an_existing_field_of_the_endpoint() -> None:
    """KEDA reads a field that exists.

    The settings of its metrics-api scaler are strings, which no schema describes.
    """
    manifests = scaling_manifests()
    [trigger] = manifests["ScaledObject"]["spec"]["triggers"]
    settings = trigger["metadata"]
    assert set(settings) == {"url", "valueLocation", "targetValue", "authMode"}
    assert all(isinstance(value, str) for value in settings.values())
    assert float(settings["targetValue"]) >= 1
    nothing = GroupScale(0, True, 0, 0, 0, 0)
    value: Any = as_json(ScaleView("f", 0, 100, 30.0, nothing, {}, []))
    for name in settings["valueLocation"].split("."):
        value = value[name]
    assert value == 0
    url = urlsplit(settings["url"])
    service = manifests["Service"]
    [port] = service["spec"]["ports"]
    assert url.hostname is not None
    assert url.hostname.split(".")[0] == service["metadata"]["name"]
    assert (url.port, url.path) == (port["port"], "/scale")
    authentication = manifests["TriggerAuthentication"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    [secret] = authentication["spec"]["secretTargetRef"]
    assert (settings["authMode"], secret["parameter"]) == ("bearer", "token")


def test_scaling_pod_shares_the_configuration_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, deployment, *_ = documents(KUBERNETES / "streamqd.yaml")
    manifests = scaling_manifests()
    [container] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    [other] = deployment["spec"]["template"]["spec"]["containers"]

    assert manifests["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == "streamqd"
    assert container["image"] == other["image"]
    assert container["securityContext"] == other["securityContext"]
    mounts = {each["name"]: each for each in other["volumeMounts"]}
    assert all(mounts[each["name"]] == each for each in container["volumeMounts"])
    volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
    assert all(volumes[each["name"]] == each for each in pod["volumes"])
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    # The command accepts all of its arguments, and complains only about the missing server.
    path = tmp_path / "streamq.toml"
    path.write_text(daemon["data"]["streamq.toml"])
    (tmp_path / "http-token").write_text("token")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    _, config_path, command, *options = container["args"]
    assert config_path == other["args"][1]
    # Click keeps the help options of the first context that a command has, so it needs those of the
    # root.
    root = click.Context(cli, **cli.context_settings)
    params = scale.make_context(command, options, parent=root).params
    loaded = config.load(path, {"http.bind": params["bind"]})
    assert loaded.http.address == ("0.0.0.0", container["ports"][0]["containerPort"])


def test_image_and_manifests_agree() -> None:
    _, deployment, *_ = documents(KUBERNETES / "streamqd.yaml")
    pod = deployment["spec"]["template"]["spec"]
    [compose] = documents(DOCKER / "compose.yaml")
    image = (DOCKER / "Dockerfile").read_text()
    service = compose["services"]["streamqd"]

    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert f"\nUSER {user}\n" in image
    assert seconds(service["stop_grace_period"]) > config.load(None).daemon.drain_timeout
    assert (DOCKER / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    command = json.loads(re.search(r"^CMD (\[.*\])$", image, re.MULTILINE)[1])
    assert command == pod["containers"][0]["args"]
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", image, re.MULTILINE)[1])
    assert entry == ["/opt/streamqd/bin/streamqd"]


def test_image_copies_only_existing_files() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    copied = {
        name
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    }
    let_in = {
        line[1:]
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }

    assert copied == let_in
    assert re.search(r"^ARG PYTHON=python:\S+@sha256:[0-9a-f]{64}$", "\n".join(lines), re.MULTILINE)
    assert "--require-hashes -r requirements.lock" in "\n".join(lines)
    assert all((ROOT / name).exists() for name in copied)
