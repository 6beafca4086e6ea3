"""Every verb of the command line, with its options."""

from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, subcommand

from shallowdraft import __doc__ as about
from shallowdraft.commands.accuracy import AccuracyCommand
from shallowdraft.commands.bench import BenchCommand
from shallowdraft.commands.demo import DemoCommand
from shallowdraft.commands.design import DesignCommand
from shallowdraft.commands.distill import DistillCommand
from shallowdraft.commands.export import ExportCommand
from shallowdraft.commands.generate import GenerateCommand
from shallowdraft.commands.heads import HeadsCommand
from shallowdraft.commands.inspect import InspectCommand
from shallowdraft.commands.online import OnlineCommand
from shallowdraft.commands.options import Command
from shallowdraft.commands.pair import PairCommand
from shallowdraft.commands.predict import PredictCommand
from shallowdraft.commands.pretrain import PretrainCommand
from shallowdraft.commands.profile import ProfileCommand
from shallowdraft.commands.prune import PruneCommand
from shallowdraft.commands.record import RecordCommand
from shallowdraft.commands.replay import ReplayCommand
from shallowdraft.commands.report import ReportCommand
from shallowdraft.commands.serve import ServeCommand
from shallowdraft.commands.skip_search import SkipSearchCommand
from shallowdraft.commands.study import StudyCommand
from shallowdraft.commands.zoo import ZooCommand

Verb = (
    Annotated[StudyCommand, subcommand("study")]
    | Annotated[ReportCommand, subcommand("report")]
    | Annotated[GenerateCommand, subcommand("generate")]
    | Annotated[ServeCommand, subcommand("serve")]
    | Annotated[InspectCommand, subcommand("inspect")]
    | Annotated[RecordCommand, subcommand("record")]
    | Annotated[ReplayCommand, subcommand("replay")]
    | Annotated[ProfileCommand, subcommand("profile")]
    | Annotated[PredictCommand, subcommand("predict")]
    | Annotated[AccuracyCommand, subcommand("accuracy")]
    | Annotated[DesignCommand, subcommand("design")]
    | Annotated[SkipSearchCommand, subcommand("skip-search")]
    | Annotated[ExportCommand, subcommand("export")]
    | Annotated[BenchCommand, subcommand("bench")]
    | Annotated[PretrainCommand, subcommand("pretrain")]
    | Annotated[PruneCommand, subcommand("prune")]
    | Annotated[DistillCommand, subcommand("distill")]
    | Annotated[HeadsCommand, subcommand("heads")]
    | Annotated[OnlineCommand, subcommand("online")]
    | Annotated[ZooCommand, subcommand("zoo")]
    | Annotated[PairCommand, subcommand("pair")]
    | Annotated[DemoCommand, subcommand("demo")]
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
