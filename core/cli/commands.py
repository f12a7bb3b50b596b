"""The command group. A command's module is imported only when that command runs."""

import importlib

import click

from ..suggest import did_you_mean

COMMANDS: dict[str, str] = {
    "complete": "Complete a prompt, or answer it if the model is an instruct model.",
    "chat": "Chat with a model in the terminal.",
    "embed": "Print the embeddings of texts.",
    "transcribe": "Print the text of recordings, by a Whisper model.",
    "serve": "Serve a model over HTTP, with the APIs of OpenAI and Anthropic.",
    "run-batch": "Answer a file of requests in OpenAI's batch format.",
    "plan": "Show what a model needs and whether it fits; loads nothing.",
    "devices": "List platforms and devices, and why some cannot be used.",
    "doctor": "Try a device for real: allocate, multiply, choose op providers.",
    "conformance": "Run the conformance kit on a device.",
    "bench": "Measure speed.",
    "models": "List the models in the caches, with size and fit.",
    "download": "Fetch a model into the cache.",
    "version": "Show versions of headrace and of what it uses.",
}
"""Name -> what `--help` says. The module headrace.core.cli.<name>, with _ for -, holds the command as `command`."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and one line about each without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module. An unknown name is a usage error that names near ones."""
        if cmd_name not in COMMANDS:
            raise click.UsageError(f"no command {cmd_name!r}{did_you_mean(cmd_name, COMMANDS)}", ctx)
        command: click.Command = importlib.import_module(f".{cmd_name.replace('-', '_')}", __package__).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from headrace import __version__

        click.echo(f"headrace {__version__}")
        ctx.exit()


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Run language models on whatever accelerator is in the machine.

    Results go to stdout, logs and progress to stderr. MODEL is a hub id (org/name), a folder, a .gguf file, or
    left out for the embedded default model.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
