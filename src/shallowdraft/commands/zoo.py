"""shallowdraft zoo: the models that ship with the package."""

import json
from dataclasses import dataclass
from typing import Any

from shallowdraft.commands.options import Command, Json


@dataclass(frozen=True, kw_only=True)
class ZooCommand(Command):
    """List the trained models that ship with the package; use them as zoo:NAME wherever a checkpoint folder is asked.

    Example: shallowdraft generate --target zoo:target --draft zoo:1x256 --prompt "Once upon a time"
    """

    json_output: Json = False
    """Print the cards as a JSON list, with recipe, data and licences."""

    def run(self) -> int:
        from shallowdraft.models import zoo

        cards = [zoo.card(name) for name in zoo.names()]
        if not cards and not self.json_output:
            print("the zoo is empty; build it from a folder of text: make zoo CORPUS=DIR")
        elif self.json_output:
            print(json.dumps(cards))
        else:
            _show(cards)
        return 0


def _show(cards: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from shallowdraft.display.tables import table_console

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="one target and drafts of it; figures on held-out text")
    table.add_column("name", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("made by", min_width=12)
    for column in ("tokens", "loss", "accepted", "TAR"):
        table.add_column(column, justify="right", no_wrap=True)
    for card in cards:
        held_out = card["held_out"]
        figures = [f"{held_out[name]:.2f}" if name in held_out else "" for name in ("loss", "acceptance", "greedy_tar")]
        sizes = f"{card['parameters'] / 1e6:.1f} M", card["method"], f"{card['tokens'] / 1e6:,.0f} M"
        table.add_row(f"zoo:{card['name']}", card["shape"], *sizes, *figures)
    console = table_console()
    console.print(table)
    console.print(
        "accepted: share of drafted tokens under sampling; TAR: tokens an iteration, greedily, at lookahead 5",
        style="dim",
    )
