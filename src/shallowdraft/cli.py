"""The command line: `shallowdraft VERB …`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, subcommand

from shallowdraft import __doc__ as about
from shallowdraft.commands.demo import Demo
from shallowdraft.commands.distill import Distill
from shallowdraft.commands.generate import Generate
from shallowdraft.commands.inspect import Inspect
from shallowdraft.commands.options import Command
from shallowdraft.commands.pair import Pair
from shallowdraft.commands.pretrain import Pretrain
from shallowdraft.commands.prune import Prune
from shallowdraft.errors import ShallowdraftError

Verb = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Pretrain, subcommand("pretrain")]
    | Annotated[Prune, subcommand("prune")]
    | Annotated[Distill, subcommand("distill")]
    | Annotated[Pair, subcommand("pair")]
    | Annotated[Demo, subcommand("demo")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that the user can put right take one line and exit code 2."""
    command: Command = tyro.cli(
        Verb,
        prog="shallowdraft",
        description=(about or "").splitlines()[0],
        args=argv,
        config=(FlagCreatePairsOff, OmitArgPrefixes),
    )
    try:
        return command.run()
    except ShallowdraftError as error:
        if command.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if command.debug:
            raise
        print(f"error: {error}; check the path, its permissions and the free space", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
