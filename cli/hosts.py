"""`agentcache serve --hosts FILE`: runs the command on every host by MLX's launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from agentcache.errors import ConfigError

OPTION = "--hosts"
_LAUNCH = "import sys; from mlx._distributed_utils.launch import main; sys.exit(main())"


def launch_on(hosts: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by `mlx.launch`, which runs these arguments on every host."""
    if not hosts.is_file():
        raise ConfigError(f"there is no file {hosts} of hosts")
    command = [sys.executable, "-m", "agentcache", *without_hosts(arguments)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", _LAUNCH, "--hostfile", str(hosts.absolute()), "--", *command])


def without_hosts(arguments: Sequence[str]) -> list[str]:
    kept, rest = list[str](), iter(arguments)
    for argument in rest:
        if argument == OPTION:
            next(rest, None)
        elif not argument.startswith(f"{OPTION}="):
            kept.append(argument)
    return kept
