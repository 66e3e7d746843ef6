"""An `AsyncProducer` in FastAPI: the lifespan of Starlette, and a dependency for routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from streamqd.producer.asynchronous import AsyncProducer
from streamqd.starlette import Lifespan, producer_lifespan, producer_of

__all__ = ["AppProducer", "Lifespan", "producer_lifespan", "producer_of"]

# The annotation of a route's parameter that receives the producer of the application.
AppProducer = Annotated[AsyncProducer, Depends(producer_of)]
