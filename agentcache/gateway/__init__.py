"""The asyncio side of the engine: who waits for what, and what a client gets."""
