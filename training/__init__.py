"""How the embedded model was made (`python -m training --help`)."""
