import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, TEXT, UNSEEN, tokenizer_of

import shallowdraft as sd
from shallowdraft.decoding.text import TextStream, text_after, text_stream
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


@st.composite
def prompt_and_tokens(draw: st.DrawFn, kind: str) -> tuple[list[int], list[int]]:
    """Text cut anywhere, and tokens at random."""
    tokenizer = tokenizer_of(kind)
    written = tokenizer.encode(draw(st.sampled_from([*TEXT, UNSEEN])), add_special_tokens=False)
    ids = st.integers(0, len(tokenizer) - 1)
    bytes_of = st.sampled_from(tokenizer.encode("€漢😀 a", add_special_tokens=False))
    cut = draw(st.integers(0, len(written)))
    parts = [draw(st.lists(ids | bytes_of, max_size=8)) for _ in range(2)]
    return written[:cut] + parts[0], written[cut:][: draw(st.integers(0, 12))] + parts[1]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_text_is_what_the_whole_has_beyond_the_prompt(kind: str, data: st.DataObject):
    prompt, tokens = data.draw(prompt_and_tokens(kind))
    model = sd.Model("m", None, tokenizer_of(kind))
    stream = text_stream(model, prompt)
    text = "".join(stream.push(token) for token in tokens) + stream.flush()
    assert text == text_after(model, prompt, tokens)
    before, whole = model.decode(prompt), model.decode(prompt + tokens)
    if whole.startswith(before):
        assert text == whole[len(before) :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_its_text_are_the_whole(kind: str):
    """Cut between any two tokens; what the tokenizer itself makes of the rest lacks the space before it."""
    model = sd.Model("m", None, tokenizer_of(kind))
    ids = model.tokenizer.encode(TEXT[0] + UNSEEN, add_special_tokens=False)
    whole = model.decode(ids)
    cuts = [cut for cut in range(len(ids) + 1) if whole.startswith(model.decode(ids[:cut]))]
    assert len(cuts) > len(ids) / 3
    for cut in cuts:
        assert model.decode(ids[:cut]) + text_after(model, ids[:cut], ids[cut:]) == whole


@pytest.mark.parametrize("kind", ["byte-level", "llama", "bytes"])
def test_a_character_that_the_prompt_begins_belongs_to_the_text(kind: str):
    model = sd.Model("m", None, tokenizer_of(kind))
    ids = model.tokenizer.encode("a字", add_special_tokens=False)
    last = next(n for n in range(len(ids), 0, -1) if "字" not in model.decode(ids[:n]))
    assert text_after(model, ids[:last], ids[last:]) == "字"


def test_a_stop_string_of_bytes_ends_the_text_at_once():
    """Though the next byte could spoil it."""
    model = sd.Model("m", None, tokenizer_of("llama"))
    prompt, line = model.tokenizer.encode("Lily"), model.tokenizer.convert_tokens_to_ids("<0x0A>")
    stream = text_stream(model, prompt, ["\n"])
    assert stream.push(line) == ""
    assert stream.stopped
    assert text_stream(model, prompt).push(line) == ""  # else it waits for the next


def test_long_texts_are_decoded_a_few_tokens_at_a_time():
    seen = []
    ids = TOKENIZER.encode(TEXT[0] * 20)
    stream = TextStream(lambda tokens: [seen.append(len(tokens)), decode(tokens)][1], (), ids)
    for token in ids:
        stream.push(token)
    assert max(seen) < 10
