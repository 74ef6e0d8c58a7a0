"""Models that need no download: the embedded one, and random ones of any shape."""
