"""One model on several processes: workers repeat rank 0's steps on their own heads and files."""
