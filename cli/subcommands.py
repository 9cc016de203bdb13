"""A command that has others below it, named by its first word; anything else is its own."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence
from importlib import import_module
from typing import ClassVar

import click


class WithSubcommands(click.Command):
    """`df-run batch ..` and `df-run score ..`, beside `df-run MODEL ..`. They are imported when they are asked for."""

    others: ClassVar[dict[str, tuple[str, str]]] = {  # name: where it is, and what it does
        "batch": ("deltafin.cli.batch:batch", "answer a file of requests, many at once"),
        "score": ("deltafin.cli.score:score", "say how likely given texts are"),
    }

    def main(  # type: ignore[override]
        self, args: MutableSequence[str] | None = None, prog_name: str | None = None, **extra: object
    ) -> object:
        words = list(sys.argv[1:] if args is None else args)
        if not words or words[0] not in self.others:
            return super().main(words, prog_name, **extra)  # type: ignore[call-overload]
        command = self.load(words[0])
        # Only for its name: that of this command, which messages begin with.
        with click.Context(click.Group(prog_name), info_name=prog_name) as parent:
            return command.main(words[1:], words[0], parent=parent, **extra)  # type: ignore[call-overload]

    def load(self, name: str) -> click.Command:
        module, _, attribute = self.others[name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Further commands, each with its own --help; a model of that name is ./NAME"):
            formatter.write_dl([(f"{ctx.command_path} {name}", what) for name, (_, what) in self.others.items()])
