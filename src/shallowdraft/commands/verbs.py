"""Every verb of the command line, with its options."""

from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, subcommand

from shallowdraft import __doc__ as about
from shallowdraft.commands.accuracy import Accuracy
from shallowdraft.commands.bench import Bench
from shallowdraft.commands.demo import Demo
from shallowdraft.commands.design import Design
from shallowdraft.commands.distill import Distill
from shallowdraft.commands.export import Export
from shallowdraft.commands.generate import Generate
from shallowdraft.commands.heads import Heads
from shallowdraft.commands.inspect import Inspect
from shallowdraft.commands.online import Online
from shallowdraft.commands.options import Command
from shallowdraft.commands.pair import Pair
from shallowdraft.commands.predict import Predict
from shallowdraft.commands.pretrain import Pretrain
from shallowdraft.commands.profile import Profile
from shallowdraft.commands.prune import Prune
from shallowdraft.commands.record import Record
from shallowdraft.commands.replay import Replay
from shallowdraft.commands.report import Report
from shallowdraft.commands.serve import Serve
from shallowdraft.commands.skip_search import SkipSearch
from shallowdraft.commands.study import Study
from shallowdraft.commands.zoo import Zoo

Verb = (
    Annotated[Study, subcommand("study")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Record, subcommand("record")]
    | Annotated[Replay, subcommand("replay")]
    | Annotated[Profile, subcommand("profile")]
    | Annotated[Predict, subcommand("predict")]
    | Annotated[Accuracy, subcommand("accuracy")]
    | Annotated[Design, subcommand("design")]
    | Annotated[SkipSearch, subcommand("skip-search")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Pretrain, subcommand("pretrain")]
    | Annotated[Prune, subcommand("prune")]
    | Annotated[Distill, subcommand("distill")]
    | Annotated[Heads, subcommand("heads")]
    | Annotated[Online, subcommand("online")]
    | Annotated[Zoo, subcommand("zoo")]
    | Annotated[Pair, subcommand("pair")]
    | Annotated[Demo, subcommand("demo")]
)


def parse(arguments: Sequence[str], *, shown: bool) -> Command:
    """The command that was typed; helps and what is wrong with its options end the program, shown or not."""
    command: Command = tyro.cli(
        Verb,
        prog="shallowdraft",
        description=(about or "").splitlines()[0],
        args=arguments,
        config=(FlagCreatePairsOff, OmitArgPrefixes),
        console_outputs=shown,
    )
    return command
