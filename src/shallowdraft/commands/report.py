"""shallowdraft report: a study's records as one page to look at."""

import json
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from shallowdraft.commands.options import Command, Json, Name


@dataclass(frozen=True, kw_only=True)
class ReportCommand(Command):
    """Make one HTML page of a study: does it pay, which draft, which lookahead, why, what would be better.

    It is made from the run's records alone, opens anywhere without a network, and can be made again at any time, also
    while a study is unfinished. Several runs are compared; where their targets differ, TAR across targets is shown.
    Example: shallowdraft report run --figures figures
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]")]
    """Folder of a study; several to compare them."""
    out: Name = None
    """File to write. Default: report.html in RUN; of several runs, comparison.html in the first."""
    figures: Name = None
    """Folder for every chart as SVG and PNG and every table as CSV and Markdown."""
    json_output: Json = False
    """Print {"page", "figures"} and nothing else on stdout."""

    def run(self) -> int:
        from shallowdraft.api.showing import report

        files = report(**self.arguments(report))
        if self.json_output:
            print(json.dumps(files.to_json()))
            return 0
        print(f"the report is in {files.page}")
        if self.figures:
            print(f"charts and tables are in {self.figures}")
        return 0
