"""The asyncio side of the engine: queues per agent, prompt preparation, and replies."""
