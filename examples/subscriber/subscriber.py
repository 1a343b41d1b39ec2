"""Follow an engine's KV events and keep the set of blocks that it holds."""

import sys

from kvhash.events import AllBlocksCleared, BlockRemoved, BlockStored, hash_key
from kvhash.events.records import Batch, Restart
from kvhash.events.subscriber import Source, Subscriber

held: set[int] = set()
with Subscriber(Source(*sys.argv[1:3]), from_seq="start" if len(sys.argv) > 2 else "live") as subscriber:
    for record in subscriber:
        if isinstance(record, Batch):
            for event in record.batch.events:
                if isinstance(event, BlockStored):
                    held |= set(map(hash_key, event.block_hashes))
                elif isinstance(event, BlockRemoved):
                    held -= set(map(hash_key, event.block_hashes))
                elif isinstance(event, AllBlocksCleared):
                    held.clear()
            print(f"#{record.seq}: {len(held)} blocks held", flush=True)
        else:
            print(record, flush=True)
            if isinstance(record, Restart):
                held.clear()
