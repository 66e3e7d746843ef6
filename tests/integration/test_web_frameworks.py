"""The producer and the outbox work in FastAPI, Starlette and Flask, on a real server."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Literal

import pytest
from fastapi import Depends, FastAPI, HTTPException
from flask import Flask
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from streamqd import RedisUnavailableError, config
from streamqd.errors import ConfigError
from streamqd.fastapi import AppProducer
from streamqd.flask import Streamqd
from streamqd.outbox.outbox import Outbox
from streamqd.outbox.table import DIALECTS, TABLE, OutboxTable
from streamqd.starlette import producer_lifespan, producer_of
from streamqd.store.client import Connection
from streamqd.store.keys import Keys
from tests.support.servers import Server, free_port

# This foreign key is checked only at the commit.
LATE = (
    "CREATE TABLE late (id INTEGER PRIMARY KEY,"
    " other INTEGER REFERENCES late (id) DEFERRABLE INITIALLY DEFERRED)"
)


def make_settings(server: Server) -> dict[str, Any]:
    return {"redis": {"url": server.url}, "topics": {"orders": {"partitions": 1}}}


def read_payloads(link: Connection) -> list[Any]:
    """Return the payloads in the topic `orders`."""
    entries = link.execute("XRANGE", Keys().stream("orders", 0), "-", "+")
    return [json.loads(fields[fields.index(b"payload") + 1]) for _, fields in entries]


def fastapi_app(settings: Mapping[str, Any]) -> FastAPI:
    app = FastAPI(lifespan=producer_lifespan(settings, timeout="1s"))

    @app.post("/orders")
    async def create(order: dict[str, int], producer: AppProducer) -> dict[str, str]:
        try:
            return {"uid": await producer.send("orders", order)}
        except RedisUnavailableError as error:
            raise HTTPException(503) from error

    return app


async def orders(request: Request) -> JSONResponse:
    uid = await producer_of(request).send("orders", await request.json())
    return JSONResponse({"uid": uid})


def test_fastapi_route_gets_the_producer_of_the_lifespan(server: Server, link: Connection) -> None:
    with TestClient(fastapi_app(make_settings(server))) as client:
        uids = [client.post("/orders", json={"id": n}).json()["uid"] for n in (7, 8)]

    assert read_payloads(link) == [{"id": 7}, {"id": 8}]
    assert [uid.rpartition("/")[0] for uid in uids] == ["orders/0", "orders/0"]


def test_fastapi_returns_503_while_redis_is_unavailable() -> None:
    away = {"redis": {"url": f"redis://127.0.0.1:{free_port()}/0"}}

    with TestClient(fastapi_app(away)) as client:
        assert client.post("/orders", json={}).status_code == 503


def test_starlette_mounts_share_the_producer(server: Server, link: Connection) -> None:
    """An application that has its own lifespan adds the state of `producer_lifespan` to it."""
    opened = producer_lifespan(make_settings(server))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        async with opened(app) as state:
            yield {**state, "own": 1}

    inner = Starlette(routes=[Route("/orders", orders, methods=["POST"])])
    app = Starlette(routes=[Mount("/inner", app=inner)], lifespan=lifespan)
    with TestClient(app) as client:
        assert client.post("/inner/orders", json={"id": 1}).status_code == 200

    assert read_payloads(link) == [{"id": 1}]


def test_fastapi_error_without_a_lifespan_names_the_remedy() -> None:
    app = Starlette(routes=[Route("/orders", orders, methods=["POST"])])

    with TestClient(app) as client, pytest.raises(RuntimeError, match="lifespan=producer_lifespan"):
        client.post("/orders", json={})


def test_fastapi_refuses_to_start_with_wrong_settings(server: Server) -> None:
    app = Starlette(lifespan=producer_lifespan({"redis": {"urll": server.url}}))

    with pytest.raises(ConfigError, match=r"redis\.urll"), TestClient(app):
        pass


def test_flask_extension_sends_and_inserts(
    server: Server, link: Connection, tmp_path: Path
) -> None:
    streamqd = Streamqd()
    app = Flask("shop")
    app.config["STREAMQD"] = make_settings(server)
    streamqd.init_app(app)

    @app.post("/orders/<int:number>")
    def create(number: int) -> str:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
            uid = streamqd.outbox.send(database, "orders", {"id": number})
            database.commit()
        return streamqd.producer.send("orders", {"id": number, "outbox": uid})

    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        for statement in OutboxTable(TABLE, DIALECTS["sqlite"]).create():
            database.execute(statement)
        assert app.test_client().post("/orders/7").status_code == 200
        [(uid, payload)] = database.execute("SELECT uid, payload FROM streamqd_outbox").fetchall()
    with app.app_context():
        streamqd.producer.close()

    assert json.loads(payload) == {"id": 7}
    assert read_payloads(link) == [{"id": 7, "outbox": f"orders/outbox/{uid}"}]


def test_flask_applications_have_separate_producers(server: Server) -> None:
    streamqd = Streamqd()
    apps = [Flask(name) for name in ("one", "two", "without")]
    for app in apps[:2]:
        app.config["STREAMQD"] = make_settings(server)
        streamqd.init_app(app)

    with apps[0].app_context():
        first = streamqd.producer
    with apps[1].app_context():
        assert streamqd.producer is not first
    with (
        apps[2].app_context(),
        pytest.raises(RuntimeError, match="without is not initialized for streamqd"),
    ):
        _ = streamqd.producer


def test_flask_setting_is_checked_at_the_start() -> None:
    app = Flask("shop")
    app.config["STREAMQD"] = 5

    with pytest.raises(ConfigError, match="STREAMQD must be a path or a dictionary"):
        Streamqd(app)


@pytest.mark.parametrize(("scope", "status"), [("function", 500), (None, 201)])
def test_fastapi_function_scope_commits_before_the_response(
    tmp_path: Path, scope: Literal["function"] | None, status: int
) -> None:
    """The commit comes before the response.

    Without the scope, the client would get 201 although the commit fails.
    """
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    outbox = Outbox(settings=config.Settings())

    @event.listens_for(engine.sync_engine, "connect")
    def _check_foreign_keys(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine.begin() as connection:
            for statement in OutboxTable(TABLE, DIALECTS["sqlite"]).create():
                await connection.execute(text(statement))
            await connection.execute(text(LATE))
        yield
        await engine.dispose()

    async def transaction() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session, session.begin():
            yield session

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def create(session: AsyncSession = Depends(transaction, scope=scope)) -> str:  # noqa: B008
        await session.execute(text("INSERT INTO late VALUES (1, 2)"))  # the commit refuses this row
        return await outbox.send_async(session, "orders", {})

    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.post("/orders").status_code == status
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT COUNT(*) FROM streamqd_outbox").fetchone() == (0,)
