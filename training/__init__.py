"""The embedded model's recipe (`python -m training --help`)."""
