"""The options of generation are stated in one way in three places: their types, their defaults and their help."""

import re
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

import shallowdraft as sd
from shallowdraft.decoding.drafters.create import CREATE
from shallowdraft.decoding.options import BRANCHING, DRAFTLESS, Options, Settings
from shallowdraft.runs.candidate import DrafterName

INTERNAL = {"full_proposals", "streams"}


def test_options_are_the_fields_of_settings():
    types = get_type_hints(Settings)
    assert get_type_hints(Options) == {field.name: types[field.name] for field in fields(Settings)[: -len(INTERNAL)]}
    assert types.keys() - get_type_hints(Options).keys() == INTERNAL


@pytest.mark.parametrize("option", get_type_hints(Options))
def test_the_help_of_generate_has_each_option_with_its_default(option: str):
    (line,) = re.findall(rf"^ +{option} \((.*?)\): ", sd.generate.__doc__, re.MULTILINE)
    default = repr(getattr(Settings(), option)).replace("'", '"')
    assert line.endswith(f" = {default}")


def test_every_drafter_can_be_created():
    assert tuple(CREATE) == get_args(DrafterName)
    assert {*BRANCHING, *DRAFTLESS} < {*CREATE}
