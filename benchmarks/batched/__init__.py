"""Several agents at once on one server."""
