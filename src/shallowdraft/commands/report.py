"""shallowdraft report: a study's records as one page to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from shallowdraft.commands.options import Command, Name
from shallowdraft.errors import OptionError

FILE = "report.html"
MISSING = "the report needs altair and vl-convert; install them: pip install 'shallowdraft[report]'"


@dataclass(frozen=True, kw_only=True)
class ReportCommand(Command):
    """Make one HTML page of a study: does it pay, which draft, which lookahead, why, what would be better.

    It is made from the run's records alone, opens anywhere without a network, and can be made again at any time, also
    while a study is unfinished. Several runs are compared; where their targets differ, TAR across targets is shown.
    Example: shallowdraft report run --figures figures
    """

    run_folders: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]")]
    """Folder of a study; several to compare them."""
    out: Name = None
    """File to write. Default: report.html in RUN; of several runs, comparison.html in the first."""
    figures: Name = None
    """Folder for every chart as SVG and PNG and every table as CSV and Markdown."""

    def run(self) -> int:
        folders = [Path(one) for one in self.run_folders]
        if not folders:
            raise OptionError("no run is named; name the folder that was given to study --out")
        if len({folder.resolve() for folder in folders}) < len(folders):
            raise OptionError("a run is named twice; name each once")
        out = Path(self.out) if self.out else folders[0] / (FILE if len(folders) == 1 else "comparison.html")
        print(f"the report is in {write_report(folders, out, self.figures)}")
        if self.figures:
            print(f"charts and tables are in {self.figures}")
        return 0


def write_report(folders: list[Path], out: Path, figures: str | None = None) -> Path:
    """Where it was written to."""
    try:
        from shallowdraft.report.figure_files import write_figures
        from shallowdraft.report.page import make_page, render
    except ImportError as error:
        raise OptionError(MISSING) from error
    from shallowdraft.records import write_whole
    from shallowdraft.report.reading import read_run

    page = make_page([read_run(folder) for folder in folders])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, render(page))
    if figures:
        write_figures(page.figures, Path(figures))
    return out
