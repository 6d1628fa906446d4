"""The HTTP endpoint: the only place that knows aiohttp."""
