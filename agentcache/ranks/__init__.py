"""One model on several processes: rank 0 decides and tells, the others do the same on their own heads and files."""
