"""The command `rankwise`: parses its arguments, and prints results."""

from __future__ import annotations

import click

from rankwise.cli.env_command import env
from rankwise.cli.launch_command import launch
from rankwise.cli.server_command import server


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rankwise", prog_name="rankwise")
def main() -> None:
    """Run PyTorch programs on several ranks, and inspect the launcher's variables.

    Shell completion: eval "$(_RANKWISE_COMPLETE=bash_source rankwise)" (or zsh_source, fish_source).
    """


main.add_command(launch)
main.add_command(env)
main.add_command(server)
