"""Charts and tables as files, for papers and slides."""

import csv
from pathlib import Path

import vl_convert

from shallowdraft.files import path_in_errors
from shallowdraft.reporting.figures import WIDTH, Figure, Table

SCALE = 2.0  # of pixels


def write_figures(figures: list[Figure], folder: Path) -> list[Path]:
    """Each chart as SVG and PNG, each table as CSV and Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for figure in figures:
        spec = figure.spec(width=WIDTH)
        written: dict[str, str | bytes] = {
            "svg": vl_convert.vegalite_to_svg(spec),
            "png": vl_convert.vegalite_to_png(spec, scale=SCALE),
            "md": f"{figure.finding}\n\n{markdown(figure.table)}",
        }
        for ending, content in written.items():
            path = folder / f"{figure.id}.{ending}"
            with path_in_errors(path):
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            found.append(path)
        found.append(_csv(figure.table, folder / f"{figure.id}.csv"))
    return found


def markdown(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.shown]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _csv(table: Table, path: Path) -> Path:
    """With all digits."""
    with path_in_errors(path), path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([table.columns, *table.rows])
    return path
