"""What each design choice costs in answers."""
