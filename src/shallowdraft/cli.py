"""The command line: `shallowdraft VERB …`."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, subcommand

from shallowdraft import __doc__ as about
from shallowdraft import __version__
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
from shallowdraft.errors import ShallowdraftError

SPINS = "30000"  # about 50 us, then a waiting thread sleeps

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that the user can put right take one line and exit code 2."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Threads that wait for each other without end stand still beside a busy process; see docs/decisions/001.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if arguments == ["--version"]:
        print(f"shallowdraft {__version__}")
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        return _run(arguments)
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
    command: Command = tyro.cli(
        Verb,
        prog="shallowdraft",
        description=(about or "").splitlines()[0],
        args=arguments,
        config=(FlagCreatePairsOff, OmitArgPrefixes),
    )
    try:
        return command.run()
    except BrokenPipeError:
        raise
    except (ShallowdraftError, OSError) as error:
        if command.debug:
            raise
        advice = "" if isinstance(error, ShallowdraftError) else "; check the path, its permissions and the free space"
        print(f"error: {error}{advice}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
