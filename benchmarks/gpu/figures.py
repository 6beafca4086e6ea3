"""Charts of the measurements of contexts.py and depth.py, from their CSV files; needs the `report` extra, no GPU.

python benchmarks/gpu/figures.py [--results benchmarks/results/gpu] [--out docs/images]
"""

import argparse
import csv
from pathlib import Path

import altair as alt

WIDTH, HEIGHT = 220, 200
FAMILIES = {
    "4a": ("layers:O", "layers, equal weights in layers"),
    "4b": ("layers:O", "layers of d_model 2048"),
    "4c": ("d_model:O", "d_model, 4 layers"),
    "table 6": ("layers:O", "layers, OPT-350M's weights"),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def contexts(path: Path) -> alt.Chart:
    """Draw the share of the floor by context, one line per batch size."""
    rows = [row | {"share": float(row["share"]), "batch": int(row["batch"])} for row in rows_of(path)]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("context:O", sort=None, title="tokens of context", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("share:Q", title="share of the floor", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%")),
            color=alt.Color("batch:O", title="batch", scale=alt.Scale(scheme="viridis")),
            column=alt.Column("way:N", title=None),
        )
        .properties(width=1.5 * WIDTH, height=HEIGHT)
    )


def depth(path: Path) -> alt.HConcatChart:
    """Draw microseconds per draft step, measured and at the floor, one panel per family of shapes."""
    panels = []
    for family, (x, title) in FAMILIES.items():
        rows = []
        for row in rows_of(path):
            if not row["family"].startswith(family):
                continue
            size = {"layers": int(row["layers"]), "d_model": int(row["shape"].split("x")[1].split("/")[0])}
            rows.append(size | {"us": 1e6 * float(row["step_s"]), "what": "measured"})
            rows.append(size | {"us": 1e6 * float(row["floor_s"]), "what": "floor"})
        panels.append(
            alt.Chart(alt.Data(values=rows))
            .mark_line(point=True)
            .encode(
                x=alt.X(x, title=title, axis=alt.Axis(labelAngle=0)),
                y=alt.Y("us:Q", title="us a step", scale=alt.Scale(zero=True)),
                color=alt.Color("what:N", title=None, scale=alt.Scale(range=["#9e9e9e", "#2a6fbb"])),
            )
            .properties(width=WIDTH, height=HEIGHT)
        )
    return alt.hconcat(*panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/gpu"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("contexts", contexts), ("depth", depth)):
        path = args.out / f"gpu-{name}.png"
        draw(args.results / f"{name}.csv").save(path, ppi=144)
        print(path)


if __name__ == "__main__":
    main()
