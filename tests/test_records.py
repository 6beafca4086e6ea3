"""Files of records: what a kill leaves, what does not belong together."""

import json
from pathlib import Path

import pytest

from shallowdraft.errors import RecordError
from shallowdraft.records import Records, write_whole


def test_a_half_written_line_is_dropped_and_the_rest_kept(tmp_path: Path):
    path = tmp_path / "deep" / "file.jsonl"
    file = Records.open(path, "thing", {"a": 1})
    file.append({"n": 1})
    file.append({"n": 2})
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:cut])
        again = Records.open(path, "thing", {"a": 1})
        kept = [row["n"] for row in again]
        assert kept == [1, 2][: whole[:cut].count(b"\n") - 1]
        again.append({"n": 3})
        assert [row["n"] for row in again] == [*kept, 3]


def test_a_half_written_header_is_written_again(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    Records.open(path, "thing", {"a": 1})
    path.write_bytes(path.read_bytes()[:20])
    assert list(Records.open(path, "thing", {"a": 1})) == []


def test_it_says_where_it_comes_from(tmp_path: Path):
    header = Records.open(tmp_path / "f", "thing", {}, device="cpu").header
    assert {"argv", "commit", "versions", "processor", "time", "device"} <= header["provenance"].keys()
    assert header["provenance"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"kind": "other", "schema": 1}\n', "no thing"),
        ('{"kind": "thing", "schema": 99}\n', "version 99"),
        ("hello\n", "not a line of JSON"),
        ("", "no thing"),
    ],
)
def test_other_files(tmp_path: Path, content: str, said: str):
    (tmp_path / "f").write_text(content)
    with pytest.raises(RecordError, match=said):
        Records.read(tmp_path / "f", "thing")


def test_another_run_does_not_mix(tmp_path: Path):
    Records.open(tmp_path / "f", "thing", {"target": "a", "n": 1})
    before = (tmp_path / "f").read_bytes()
    with pytest.raises(RecordError, match="begun with another target"):
        Records.open(tmp_path / "f", "thing", {"target": "b", "n": 1})
    assert (tmp_path / "f").read_bytes() == before
    with pytest.raises(RecordError, match="no such file"):
        Records.read(tmp_path / "g", "thing")
    assert json.loads(before.splitlines()[0])["about"] == {"target": "a", "n": 1}


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path):
    path = tmp_path / "page.html"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
