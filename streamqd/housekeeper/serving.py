"""The HTTP endpoints of an instance: the status page, its document, metrics and health."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

from streamqd.config import Settings
from streamqd.housekeeper import health, page
from streamqd.housekeeper.summary import Summary
from streamqd.http import Address, HttpRequest, HttpResponse, HttpServer, Route
from streamqd.http.access import JSON_TYPE, Access
from streamqd.metrics.exporter import Exporter
from streamqd.metrics.view import MetricsView


def serve(settings: Settings, view: MetricsView, summary: Summary) -> HttpServer:
    """Start a thread that serves the endpoints at `http.bind`, which must be set."""
    address: Address | None = settings.http.address
    assert address is not None
    if isinstance(address, Path):
        address = settings.base_dir / address
    server = HttpServer(address, routes(settings, view, summary))
    server.start()
    return server


def routes(settings: Settings, view: MetricsView, summary: Summary) -> dict[str, Route]:
    """Map the path of each endpoint to its handler, with the access checks of `http.access`."""
    exporter = Exporter(view)
    access = Access(settings.http)

    def metrics(request: HttpRequest) -> HttpResponse:
        body, content_type = exporter.render(request.headers.get("accept", ""))
        return HttpResponse(HTTPStatus.OK, body, content_type)

    def status(_request: HttpRequest) -> HttpResponse:
        document = summary.document() | {"not_ready": health.readiness_problems(view)}
        return HttpResponse(HTTPStatus.OK, json.dumps(document).encode(), JSON_TYPE)

    def front(_request: HttpRequest) -> HttpResponse:
        text = page.render(summary.document(), health.readiness_problems(view))
        return HttpResponse(HTTPStatus.OK, text.encode(), "text/html; charset=utf-8")

    pages: dict[str, Route] = {
        "/": access.require_token(front),
        "/status": access.require_token(status),
        "/metrics": access.require_token(metrics),
        "/livez": lambda asked: access.health(asked, health.liveness_problems(view)),
        "/readyz": lambda asked: access.health(asked, health.readiness_problems(view)),
        "/startupz": lambda asked: access.health(asked, health.startup_problems(view)),
    }
    return {path: access.require_host(route) for path, route in pages.items()}
