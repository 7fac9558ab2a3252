"""The help of `rankwise launch`: the usual options in groups, a line for each; all of them with `--help-all`."""

from __future__ import annotations

import shutil
from typing import Any, Final

import click

_NARROWEST: Final = 60
_OPTIONS_WIDTH: Final = 30
_ALL: Final = "rankwise.help-all"

# What an option does, by its name, in a line of 80 columns together with the option itself.
GROUPS: Final[dict[str, dict[str, str]]] = {
    "Ranks": {
        "nproc": "how many on this host; 1 by default",
        "module": "TARGET is a module, as with python -m",
        "no_python": "TARGET is an executable",
        "preload": "import these modules once for all ranks",
        "no_preload": "start each rank as a new interpreter",
    },
    "Output": {
        "show": "show the output of these ranks only",
        "no_prefix": "no [rank] before each line",
        "prefix": "host and time before the rank",
        "log_dir": "write a file for each rank",
        "log_times": "with the time of each line",
        "redirects": "streams for these files only: 1, 2, 3",
        "tee": "streams for files and the terminal",
    },
    "Failures": {
        "max_restarts": "start all ranks again, so many times",
        "grace": "time to end before SIGKILL; 10 s",
        "hang_dir": "folder for reports of hangs, and stacks",
    },
    "Debugging": {
        "debug": "stop this rank in pdb",
        "debugpy": "let this rank wait for an editor",
    },
    "Several hosts": {
        "ssh": "start ranks there too, over ssh",
        "srun": "start ranks on all nodes of the job",
        "nnodes": "number of hosts that each run this",
        "node_rank": "index of this host, from 0",
        "master_addr": "address of host 0",
        "master_port": "a free port on host 0",
        "rdzv_backend": "static, or c10d: without indices",
        "rdzv_endpoint": "where hosts meet, with c10d",
        "rdzv_id": "the same on all hosts, with c10d",
    },
}

_EXAMPLES: Final = (
    "rankwise launch -n 4 train.py --lr 0.1",
    "rankwise launch -n gpu --max-restarts 3 --log-dir logs train.py",
    "rankwise launch --ssh gpu-01,gpu-02 -n 8 -m package.train",
)


def help_all_option() -> click.Option:
    """Return the option that shows all options."""

    def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show,
        help="Show all options, with torchrun's spellings.",
    )  # fmt: skip


class CommandWithGroups(click.Command):
    """A command whose help has its usual options in groups."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - click's
        super().__init__(*args, **settings)
        self.params.append(help_all_option())

    def make_context(self, *args: Any, **settings: Any) -> click.Context:  # noqa: ANN401 - click's
        """Return a context whose help is as wide as the terminal."""
        width = max(_NARROWEST, shutil.get_terminal_size().columns)
        return super().make_context(*args, **{"max_content_width": width, **settings})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        if ctx.meta.get(_ALL):
            super().format_options(ctx, formatter)
        else:
            options = {option.name: option for option in self.params if isinstance(option, click.Option)}
            for heading, texts in GROUPS.items():
                with formatter.section(heading):
                    rows = [(_spelling(options[name], ctx), text) for name, text in texts.items()]
                    formatter.write_dl(rows, col_max=_OPTIONS_WIDTH)
            with formatter.section("Help"):
                rows = [("-h, --help", "show this"), ("--help-all", "all options, and torchrun's spellings")]
                formatter.write_dl(rows, col_max=_OPTIONS_WIDTH)
        with formatter.section("Examples"):
            for example in _EXAMPLES:
                formatter.write_text(example)


def _spelling(option: click.Option, ctx: click.Context) -> str:
    """Return the short name of an option and the first long one, with what its value is."""
    short = [name for name in option.opts if not name.startswith("--")][:1]
    long = [name for name in option.opts if name.startswith("--")][:1]
    value = "" if option.is_flag else f" {option.make_metavar(ctx)}"
    return f"{', '.join([*short, *long])}{value}"
