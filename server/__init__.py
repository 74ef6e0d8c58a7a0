"""The HTTP server: thin translations between wire dialects and the one internal request."""
