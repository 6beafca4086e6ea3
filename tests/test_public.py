"""What is promised: public names, the README's verbs, and a layout that imports nothing early."""

import re
import subprocess
from pathlib import Path

import pytest

import shallowdraft as sd

ROOT = Path(__file__).parents[1]


def test_all_is_what_is_exported():
    assert sorted(sd.__all__) == sd.__all__
    for name in sd.__all__:
        assert getattr(sd, name).__module__.startswith("shallowdraft")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sd.no_such_name


def test_the_readmes_commands_exist():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z-]+)", readme, re.M)) <= targets
    assert {"demo", "test"} <= set(re.findall(r"make ([a-z-]+)", readme))
    for verb in set(re.findall(r"^shallowdraft ([a-z-]+)", readme, re.M)):
        assert (ROOT / "src/shallowdraft/commands" / f"{verb.replace('-', '_')}.py").is_file()


def test_no_machine_is_named_in_the_project():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        if name != "tests/test_public.py" and (ROOT / name).is_file():
            text = (ROOT / name).read_text(errors="ignore")
            assert not re.search(r"/(work|root|home)/[a-z]", text), name
