"""What an agent is: its lineages, its turns on disk, its blocks in RAM."""
