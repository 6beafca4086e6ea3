import pytest
from hypothesis import given
from hypothesis import strategies as st

from shallowdraft.decoding.text import TextStream
from shallowdraft.models.synthetic import byte_tokenizer

TOKENIZER = byte_tokenizer(320)


def decode(ids) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.text(max_size=40))
def test_pieces_join_to_the_text(text: str):
    stream = TextStream(decode)
    pieces = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert "".join(pieces) + stream.flush() == text


def test_a_character_of_several_bytes_comes_whole():
    stream = TextStream(decode)
    assert [stream.push(token) for token in TOKENIZER.encode("aé€😀")] == ["a", "", "é", "", "", "€", "", "", "", "😀"]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_complete_stop_string(text: str, stops: list[str]):
    stream, seen = TextStream(decode, stops), ""
    for token in TOKENIZER.encode(text):
        seen += stream.push(token)
        if stream.stopped:
            break
    seen += stream.flush()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(ends)
    consumed = text[: min(ends)] if ends else text
    assert seen == consumed[: min((consumed.index(stop) for stop in stops if stop in consumed), default=len(consumed))]


def test_possible_starts_of_a_stop_string_are_held_back():
    stream = TextStream(decode, ["END"])
    assert [stream.push(token) for token in TOKENIZER.encode("xENENDy")[:6]] == ["x", "", "", "EN", "", ""]
    assert stream.stopped
    assert stream.flush() == ""


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_a_broken_character_is_shown_at_the_end(stops):
    stream = TextStream(decode, stops)
    assert stream.push(TOKENIZER.encode("€")[0]) == ""
    assert stream.flush() == "\ufffd"
