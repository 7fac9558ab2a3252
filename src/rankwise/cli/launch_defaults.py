"""Defaults of `rankwise launch`: torchrun's variables PET_*.

An option of the command line takes precedence over the variable. An error in a value names the variable.
"""

from __future__ import annotations

from typing import Any, Final

import click
from click.core import ParameterSource

from rankwise.cli.launch_help import CommandWithGroups

# The options for which torchrun reads a variable, by the name that is part of it.
PET_OPTIONS: Final = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "local_addr", "standalone"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts", "role"),
    *("module", "no_python", "run_path", "start_method", "virtual_local_rank", "monitor_interval"),
    *("log_dir", "redirects", "tee", "local_ranks_filter", "event_log_handler"),
    *(
        "log_line_prefix_template",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "signals_to_handle",
        "shutdown_timeout",
    ),
)


class CommandWithDefaults(CommandWithGroups):
    """A command whose options have defaults in variables, and are in groups."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **settings)
        for option in _options(self):
            for name in set(PET_OPTIONS).intersection(_names(option)):
                option.envvar = f"PET_{name.upper()}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, with defaults for the options that it lacks."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            if isinstance(error.param, click.Option) and (source := _source(ctx, error.param)):
                raise click.UsageError(f"{source}: {error.message}", ctx) from None
            raise


def sources_text(ctx: click.Context) -> str:
    """Return the options that have values from elsewhere than the command line, for an error message; "" if none."""
    sources = [source for option in _options(ctx.command) if (source := _source(ctx, option))]
    return f" (set outside of the command line: {', '.join(sources)})" if sources else ""


def is_given(ctx: click.Context, name: str) -> bool:
    """Return whether an option is on the command line."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _options(command: click.Command) -> list[click.Option]:
    return [option for option in command.params if isinstance(option, click.Option)]


def _source(ctx: click.Context, option: click.Option) -> str:
    """Return the variable that the value of an option comes from, with the value; "" if it is from no variable."""
    if ctx.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT:
        return f"{option.envvar}={option.value_from_envvar(ctx)!r}"
    return ""


def _names(option: click.Option) -> list[str]:
    """Return the long names of an option, with underscores."""
    return [name[2:].replace("-", "_") for name in option.opts if name.startswith("--")]
