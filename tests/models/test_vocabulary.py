import json
from pathlib import Path

import pytest

import shallowdraft as sd
from shallowdraft.errors import UnsupportedModelError, VocabularyError
from shallowdraft.models.synthetic import byte_tokenizer, random_decoder
from shallowdraft.models.vocabulary import compare
from shallowdraft.shapes.notation import parse_shape

WORDS = {f"w{index}": index for index in range(10)}


def test_same_map():
    assert compare(WORDS, dict(WORDS), 10, 10).relation == "same"


@pytest.mark.parametrize(("target_size", "draft_size"), [(16, 10), (10, 16), (12, 16)])
def test_same_map_but_padded(target_size: int, draft_size: int):
    check = compare(WORDS, dict(WORDS), target_size, draft_size)
    assert (check.relation, check.shared) == ("padded", 10)
    check.require()


def test_tokens_added_at_the_end_are_a_tail():
    assert compare(WORDS | {"<extra>": 10}, dict(WORDS), 16, 16).relation == "padded"


def test_different_maps_are_refused_with_what_differs():
    swapped = WORDS | {"w3": 4, "w4": 3}
    check = compare(WORDS, swapped, 10, 10)
    assert (check.relation, check.shared) == ("different", 8)
    with pytest.raises(
        VocabularyError, match=r"id 3 is 'w3' in the target and 'w4' in the draft; 8 tokens are shared of 10"
    ):
        check.require()


def test_a_hole_is_a_difference():
    holed = {token: index for token, index in WORDS.items() if index != 4}
    assert compare(WORDS, holed, 10, 10).detail == "id 4 exists only in the target"
    assert compare(holed, WORDS, 10, 10).detail == "id 4 exists only in the draft"


def test_a_fraction_of_the_vocabulary_is_no_padding():
    large = {f"w{index}": index for index in range(4096)}
    assert compare(large, {f"w{index}": index for index in range(512)}, 4096, 512).relation == "different"


def test_nothing_in_common():
    assert compare({"a": 0}, {"b": 1}, 1, 2).relation == "different"


def test_without_tokenizers_sizes_decide():
    assert compare(None, WORDS, 10, 10).relation == "same"
    assert compare(None, None, 10, 16).relation == "different"


@pytest.mark.parametrize(
    ("notation", "change", "said"),
    [
        (
            "1x64/6h/8hd/96",
            {},
            r"hidden size \(64\) is not a multiple of the number of attention heads \(6\)\); ",
        ),
        ("1x64/4h/96", {"initializer_range": "wide"}, "initializer_range"),
    ],
    ids=["heads", "a field's type"],
)
def test_a_config_that_transformers_refuses_is_blamed_with_its_reason(
    tmp_path: Path, notation: str, change: dict[str, object], said: str
):
    sd.Model("refused", random_decoder(parse_shape(notation, vocab=320)), byte_tokenizer(320)).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        sd.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: transformers refuses config.json (")
    assert "\n" not in str(caught.value)
    assert "tokenizer" not in str(caught.value)
