"""An `AsyncProducer` in FastAPI: Starlette's lifespan, and a dependency for routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from streamqd.producer.asynchronous import AsyncProducer
from streamqd.starlette import Lifespan, producer_lifespan, producer_of

__all__ = ["AppProducer", "Lifespan", "producer_lifespan", "producer_of"]

# The annotation for a route's parameter that should receive the application's producer.
AppProducer = Annotated[AsyncProducer, Depends(producer_of)]
