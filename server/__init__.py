"""The HTTP server: translates each dialect to `Request` and back."""
