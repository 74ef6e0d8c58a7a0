"""`python -m agentcache`: the command line."""

from agentcache.cli.main import main

if __name__ == "__main__":
    main()
