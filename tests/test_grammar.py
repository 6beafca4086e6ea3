"""The command line has one grammar: an option has one name, one type and one meaning in every verb."""

import ast
import dataclasses
import inspect
import types
from collections import defaultdict
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import shallowdraft as sd
from shallowdraft.commands import verbs
from shallowdraft.commands.options import Command

VERBS = {verb.__metadata__[0].name: verb.__origin__ for verb in get_args(verbs.Verb)}

# Options whose meaning a verb completes, with the words that the help must begin with.
BEGINNINGS = {
    "out": ("File", "Folder", "With"),
    "json": ("Print",),
    "shape": ("layers x d_model",),
    "api-key": ("Key of the server",),
    "learning-rate": ("Peak of the learning rate",),
    "context": ("Longest text", "Tokens of context"),
    "tokens": ("Tokens to train on",),
    "generated": ("Tokens that the target writes itself, to learn from",),
    "corpus": ("Folder of text",),
    "parent": ("Model that", "Checkpoint folder"),
    "draft": ("Draft", "A second one"),
    "model": ("Name of the model", "Checkpoint folder"),
    "max-new-tokens": ("Tokens",),
    "profile": ("Profile of this machine",),
    "drafts": ("Drafts",),
    "min-confidence": ("Draft on only", "Also find"),
}
# Options that are one number in some verbs and several or a word in others.
TYPES = {
    "lookahead": "generate also takes auto",
    "min-confidence": "replay tries several",
}


def options(command: type[Command]) -> dict[str, tuple[Any, str]]:
    """Return the type and the help of every option, by the name on the command line."""
    hints = get_type_hints(command, include_extras=True)
    documented = documents(command)
    found = {}
    for field in dataclasses.fields(command):
        annotation, help_text, name = hints[field.name], documented.get(field.name, ""), field.name
        if get_origin(annotation) is Annotated:
            for extra in annotation.__metadata__:
                name = getattr(extra, "name", None) or name
                help_text = getattr(extra, "help", None) or help_text
        found[name.replace("_", "-")] = plain(annotation), " ".join(help_text.split())
    return found


def documents(command: type[Command]) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of those that it inherits from."""
    texts: dict[str, str] = {}
    for owner in reversed(command.__mro__[:-1]):
        if owner.__module__.startswith("shallowdraft"):
            (tree,) = ast.parse(inspect.getsource(owner)).body
            assert isinstance(tree, ast.ClassDef)
            for node, below in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                    texts[ast.unparse(node.target)] = ast.literal_eval(below.value)
    return texts


def plain(annotation: Any) -> Any:
    """Return a type without its annotations, and without None: whether an option may be left out is no difference."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain(args[0])
    if origin in (Union, types.UnionType):
        kinds = [plain(arg) for arg in args if arg is not type(None)]
        return kinds[0] if len(kinds) == 1 else Union[tuple(kinds)]  # noqa: UP007
    return annotation


def test_an_option_has_one_type():
    kinds: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for verb, command in VERBS.items():
        for name, (kind, _) in options(command).items():
            kinds[name][kind].append(verb)
    different = {name: dict(by_kind) for name, by_kind in kinds.items() if len(by_kind) > 1 and name not in TYPES}
    assert different == {}


def test_an_option_has_one_meaning():
    meanings: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for verb, command in VERBS.items():
        for name, (_, text) in options(command).items():
            assert text, f"{verb} --{name} has no help"
            if name in BEGINNINGS:
                assert text.startswith(BEGINNINGS[name]), f"{verb} --{name}: {text}"
            else:
                meanings[name][text.split(". ")[0].rstrip(".")].append(verb)
    assert {name: dict(texts) for name, texts in meanings.items() if len(texts) > 1} == {}


def test_every_verb_with_a_result_has_json():
    without = [verb for verb, command in VERBS.items() if "json" not in options(command)]
    assert without == ["serve", "demo"]  # neither has a result of its own


def test_choices_are_literals():
    """What has a few values is refused by the parser, before any work."""
    for verb, name in (("prune", "objective"), ("record", "import-format"), ("prune", "method"), ("study", "dtype")):
        assert get_origin(options(VERBS[verb])[name][0]) is Literal


FUNCTIONS = {
    "record": sd.record,
    "replay": sd.replay,
    "profile": sd.profile,
    "study": sd.study,
    "design": sd.search,
    "accuracy": sd.accuracy,
    "report": sd.report,
    "export": sd.export,
    "bench": sd.bench,
    "pretrain": sd.pretrain,
    "prune": sd.prune,
    "distill": sd.distill,
    "heads": sd.train_heads,
}


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_options_are_the_parameters_of_the_api(verb: str):
    """With the same defaults; only how progress is shown is the caller's."""
    fields = {field.name: field for field in dataclasses.fields(VERBS[verb])}
    parameters = inspect.signature(FUNCTIONS[verb]).parameters
    assert parameters.keys() - fields.keys() <= {"progress"}
    for name, parameter in parameters.items():
        default = fields[name].default if name in fields else dataclasses.MISSING
        if dataclasses.MISSING is not default and parameter.default is not inspect.Parameter.empty:
            assert default == parameter.default, name
