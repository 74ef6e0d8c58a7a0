"""The command line: `python -m agentcache` is `agentcache`."""

from agentcache.cli.main import main

if __name__ == "__main__":
    main()
