"""shallowdraft demo: a study of the models that ship with the package."""

from dataclasses import dataclass

from shallowdraft.commands.options import DraftCommand
from shallowdraft.commands.study import StudyCommand
from shallowdraft.errors import CheckpointError, OptionError


@dataclass(frozen=True, kw_only=True)
class DemoCommand(DraftCommand):
    """Study the models that ship with the package: which draft is fastest here, and does it pay? No download.

    The target is among the drafts: as a draft it has weights of 8 bits. The same as `shallowdraft study --target
    zoo:target --drafts zoo:… --prompts zoo --lookaheads 1:8 --out demo` and `shallowdraft report demo`; takes about two
    minutes on two cores.
    """

    out: str = "demo"
    """Folder of the run; a demo that was stopped goes on there."""

    def run(self) -> int:
        from shallowdraft.api.showing import report
        from shallowdraft.models import zoo

        drafts = tuple(f"zoo:{name}" for name in zoo.names())
        if not drafts:
            raise CheckpointError("the zoo is empty; build it from a folder of text: make zoo CORPUS=DIR")
        code = StudyCommand(
            target="zoo:target",
            drafts=drafts,
            prompts=("zoo",),
            lookaheads="1:8",
            out=self.out,
            dtype=self.dtype,
            draft_dtype=self.draft_dtype,
            device=self.device,
            threads=self.threads,
            debug=self.debug,
        ).run()
        try:
            page = report(self.out).page
        except OptionError as error:  # the study is done all the same
            print(error)
        else:
            print(f"the report is in {page}; open it in a browser")
        return code
