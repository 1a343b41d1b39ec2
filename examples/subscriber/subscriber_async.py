"""The same in an event loop."""

import asyncio
import sys

from kvhash.events import AllBlocksCleared, BlockRemoved, BlockStored, hash_key
from kvhash.events.aio import AsyncSubscriber
from kvhash.events.records import Batch, Restart
from kvhash.events.subscriber import Source


async def follow(source: Source, from_seq: str) -> None:
    """Print how many blocks the engine holds, after each batch."""
    held: set[int] = set()
    async with AsyncSubscriber(source, from_seq=from_seq) as subscriber:
        async for record in subscriber:
            if isinstance(record, Restart):
                held.clear()
            for event in record.batch.events if isinstance(record, Batch) else ():
                if isinstance(event, BlockStored):
                    held |= set(map(hash_key, event.block_hashes))
                elif isinstance(event, BlockRemoved):
                    held -= set(map(hash_key, event.block_hashes))
                elif isinstance(event, AllBlocksCleared):
                    held.clear()
            print(
                f"#{record.seq}: {len(held)} blocks held" if isinstance(record, Batch) else record, flush=True
            )


asyncio.run(follow(Source(*sys.argv[1:3]), "start" if len(sys.argv) > 2 else "live"))
