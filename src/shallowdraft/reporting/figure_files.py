"""Charts and tables as files, for papers and slides."""

import csv
from pathlib import Path

import vl_convert

from shallowdraft.files import path_in_errors
from shallowdraft.reporting.figures import Figure, Table

CHART_WIDTH = 560  # pixels
PNG_SCALE = 2.0  # pixels of the file per pixel of the chart


def write_figures(figures: list[Figure], folder: Path) -> list[Path]:
    """Write each chart as SVG and PNG and each table as CSV and Markdown; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures:
        spec = figure.spec(width=CHART_WIDTH)
        contents: dict[str, str | bytes] = {
            "svg": vl_convert.vegalite_to_svg(spec),
            "png": vl_convert.vegalite_to_png(spec, scale=PNG_SCALE),
            "md": f"{figure.finding}\n\n{markdown(figure.table)}",
        }
        for ending, content in contents.items():
            path = folder / f"{figure.id}.{ending}"
            with path_in_errors(path):
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            paths.append(path)
        paths.append(_write_csv(figure.table, folder / f"{figure.id}.csv"))
    return paths


def markdown(table: Table) -> str:
    """Return a table in Markdown, its numbers rounded as on the page."""
    rows = [table.columns, ["---"] * len(table.columns), *table.formatted_rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _write_csv(table: Table, path: Path) -> Path:
    """Write a table with all digits of its numbers."""
    with path_in_errors(path), path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([table.columns, *table.rows])
    return path
