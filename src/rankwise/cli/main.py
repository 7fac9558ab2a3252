"""The command `rankwise`: parses its arguments, and prints results."""

from __future__ import annotations

import click

from rankwise.cli.env_command import env
from rankwise.cli.job_commands import cancel, logs, submit
from rankwise.cli.launch_command import launch
from rankwise.cli.ps_command import ps, top
from rankwise.cli.stacks_command import stacks


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rankwise", prog_name="rankwise")
def main() -> None:
    """Run PyTorch programs on several ranks, and inspect the launcher's variables and running jobs.

    Shell completion: eval "$(_RANKWISE_COMPLETE=bash_source rankwise)" (or zsh_source, fish_source).
    """


main.add_command(launch)
main.add_command(env)
main.add_command(ps)
main.add_command(top)
main.add_command(stacks)
main.add_command(submit)
main.add_command(logs)
main.add_command(cancel)
