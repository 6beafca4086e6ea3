"""Shapes that other software would not load: every command that builds or times one refuses before any work."""

from dataclasses import replace
from pathlib import Path

import pytest

from shallowdraft.cli import main
from shallowdraft.errors import OptionError
from shallowdraft.models.synthetic import make_pair
from shallowdraft.portable import refusal, require_portable
from shallowdraft.shapes.named import NAMED
from shallowdraft.shapes.notation import parse_shape
from shallowdraft.shapes.shape import ModelShape

UNEVEN = "2x64/6h/3kv/8hd/96"
NEAREST = "take 2x60/6h/3kv/8hd/96 or 2x66/6h/3kv/8hd/96 or 2x64/4h/2kv/8hd/96 or 2x64/8h/4kv/96"
TRAINING = ["--corpus", "nowhere", "--tokens", "4096"]


@pytest.mark.parametrize("name", NAMED)
def test_published_shapes_are_portable(name: str):
    assert refusal(NAMED[name]) is None


@pytest.mark.parametrize(
    ("shape", "parent", "advice"),
    [
        (parse_shape(UNEVEN), None, NEAREST),
        (
            parse_shape(UNEVEN),
            parse_shape("4x64/8h/4kv/96"),
            "take 2x60/6h/3kv/8hd/96 or 2x64/4h/2kv/8hd/96 or 2x64/8h/4kv/96",
        ),
        (parse_shape("1x64/7h/1kv/8hd/96"), parse_shape("4x64/8h/1kv/96"), "take 1x63/7h/1kv/8hd/96"),
        (replace(parse_shape("1x72/6h/3kv/8hd/96"), family="qwen2"), None, "take 1x48/6h/3kv/96"),
        (replace(parse_shape("1x72/6h/8hd/96"), family="opt", rope=None), None, "take 1x48/6h/96 or 1x72/9h/96"),
    ],
)
def test_the_nearest_shapes_are_named(shape: ModelShape, parent: ModelShape | None, advice: str):
    with pytest.raises(OptionError) as raised:
        require_portable(shape, parent)
    assert str(raised.value).endswith(f"would not load such a model; {advice}")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> str:
    pair = make_pair(parse_shape("4x64/8h/4kv/96", vocab=512), parse_shape("1x64/2h/96", vocab=512), 0.8)
    return str(pair.save(tmp_path_factory.mktemp("pair"))[0])


@pytest.mark.parametrize(
    "command",
    [
        ["prune", "--parent", "PARENT", "--shape", UNEVEN, *TRAINING],
        ["pretrain", "--shape", UNEVEN, *TRAINING],
        ["profile", "--target", "PARENT", "--shapes", "1x64/4h/2kv/96", UNEVEN],
        ["pair", "--target-shape", "4x64/8h/96", "--draft-shape", UNEVEN],
    ],
)
def test_commands_refuse_before_any_work(parent: str, tmp_path: Path, capsys, command: list[str]):
    out = tmp_path / "out"
    assert main([parent if word == "PARENT" else word for word in command] + ["--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {UNEVEN}: 6 heads do not divide d_model 64; ")
    assert printed.err.count("\n") == 1
    assert "2x64/4h/2kv/8hd/96 or 2x64/8h/4kv/96" in printed.err
    assert not out.exists()
    assert not printed.out


def test_a_shape_without_a_head_width_gets_advice(capsys):
    assert main(["pretrain", "--shape", "2x64/6h/96", *TRAINING, "--out", "never"]) == 2
    assert "another number of heads, or 60 or 66 for d_model" in capsys.readouterr().err
