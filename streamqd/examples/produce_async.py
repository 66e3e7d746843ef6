"""Send orders to the topic `orders` from many concurrent tasks, as in a web service.

    python -m streamqd.examples.produce_async redis://localhost:6379/0 100

This command sends 100 orders and prints the answer for each customer.
"""

from __future__ import annotations

import asyncio
import sys

from streamqd import AsyncProducer, BacklogFullError, OutcomeUnknownError


async def order(producer: AsyncProducer, number: int) -> str:
    """Handle one request. Return the uid of the message, or an error for the customer."""
    try:
        # With the order ID as dedup_id, a repeated send writes nothing.
        sending = producer.send(
            "orders", {"id": number}, key=f"customer-{number % 9}", dedup_id=f"order-{number}"
        )
        return await asyncio.wait_for(sending, timeout=5)
    except BacklogFullError:
        return "busy, try again in a minute"
    except (TimeoutError, OutcomeUnknownError):
        return "not sure, try again"


async def serve(url: str, requests: int) -> list[str]:
    """Answer `requests` requests concurrently and return the answers in order."""
    async with AsyncProducer(url, max_backlog=10_000) as producer:
        return await asyncio.gather(*(order(producer, number) for number in range(requests)))


if __name__ == "__main__":
    answers = asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
    sys.stdout.write("\n".join(answers) + "\n")
