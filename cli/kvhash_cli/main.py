"""The ``kvhash`` command: its subcommands are imported when they are called or listed."""

from __future__ import annotations

from importlib import import_module

import click

from .entry import version_text

__all__ = ["LazyGroup", "kvhash"]

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when it is needed; ``lazy`` maps names to module:attribute."""

    lazy: dict[str, str]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in alphabetical order."""
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name].partition(":")
        command = getattr(import_module(module, __package__), attribute)
        assert isinstance(command, click.Command)
        return command


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(version_text(ctx.find_root().info_name or "kvhash"))
        ctx.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the release, the backend and the libraries' versions.",
)


class _Kvhash(LazyGroup):
    lazy = {  # noqa: RUF012 - a constant of the class
        "check": ".check_cmd:check",
        "conformance": ".conformance_cmd:conformance",
        "contract": ".contract_cmd:contract",
        "diff": ".diff_cmd:diff",
        "explain": ".explain_cmd:explain",
        "hash": ".hash_cmd:hash_",
        "identify": ".identify_cmd:identify",
        "root": ".root_cmd:root",
        "vectors": ".vectors_cmd:vectors",
    }


@click.command(cls=_Kvhash, context_settings=CONTEXT)
@version_option
def kvhash() -> None:
    """Compute the KV-cache block hashes of vLLM, see why they are what they are, and find out what made one.

    \b
    Example:
      kvhash hash --tokens '[1,2,3,4]' --block-size 4 --algorithm sha256_cbor --hash-seed 0
    """
