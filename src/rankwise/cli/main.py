"""The command `rankwise`: its subcommands, its errors of one line, and its exit statuses."""

from __future__ import annotations

import signal
import sys
from typing import Any, Final

import click

import rankwise
from rankwise.cli.bench_command import bench
from rankwise.cli.doctor_command import doctor
from rankwise.cli.env_command import env
from rankwise.cli.job_commands import cancel, logs, submit
from rankwise.cli.launch_command import launch
from rankwise.cli.printing import output_errors
from rankwise.cli.ps_command import ps, top
from rankwise.cli.stacks_command import stacks
from rankwise.cli.trace_command import trace
from rankwise.errors import InvalidArgumentError, RankwiseError

_FAILED: Final = 1
_MISUSED: Final = 2
_VERSION_HELP: Final = "Show the version and exit."


class _Group(click.Group):
    """Subcommands that raise errors of rankwise, each of which is one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as in click
        try:
            with output_errors(of_click=True):
                return super().main(*args, **kwargs)
        except RankwiseError as error:
            click.echo(f"rankwise: {error}", err=True)
            sys.exit(_FAILED)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as in click
        try:
            return super().invoke(ctx)
        except RankwiseError as error:
            click.echo(f"rankwise: {error}", err=True)
            sys.exit(_MISUSED if isinstance(error, InvalidArgumentError) else _FAILED)
        except KeyboardInterrupt:  # of which click would make an exit status of 1
            sys.exit(128 + signal.SIGINT)


def _show_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        try:
            click.echo(f"rankwise, version {rankwise.__version__}")
        except AttributeError as error:  # of a copied package
            raise click.ClickException(str(error)) from None
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help=_VERSION_HELP)
def main() -> None:
    """Run PyTorch programs on several ranks, and inspect the launcher's variables and running jobs.

    Shell completion: eval "$(_RANKWISE_COMPLETE=bash_source rankwise)" (or zsh_source, fish_source).
    """


main.add_command(launch)
main.add_command(env)
main.add_command(doctor)
main.add_command(bench)
main.add_command(ps)
main.add_command(top)
main.add_command(stacks)
main.add_command(trace)
main.add_command(submit)
main.add_command(logs)
main.add_command(cancel)
