"""The exceptions a user can cause; each message says what was got, what is needed and what to do."""


def first_line(error: BaseException) -> str:
    """Say what an error of a library says, in one line that a terminal can show."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(text: str) -> str:
    """Put a mark for every character that a terminal would obey rather than show."""
    return "".join(one if one.isprintable() else "�" for one in text)


class ShallowdraftError(Exception):
    """Anything wrong that the user can put right; the command line prints it in one line and exits with 2."""


class OptionError(ShallowdraftError):
    """An option or argument outside its range."""


class CheckpointError(ShallowdraftError):
    """A checkpoint that is missing, incomplete, corrupt or not what its config says."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint of a family or format that this package does not run."""


class VocabularyError(ShallowdraftError):
    """A tokenizer that is missing, or a draft that does not speak the target's vocabulary."""


class PromptError(ShallowdraftError):
    """A prompt that is empty, has unknown token ids or does not fit into the context."""


class CorpusError(ShallowdraftError):
    """Text for training that is missing, unreadable, empty or of another tokenizer."""


class TrainingError(ShallowdraftError):
    """A training run that diverged, or a checkpoint that belongs to another run."""


class RecordError(ShallowdraftError):
    """A file of measurements that is missing, of another kind, another model or another machine."""


class ClusterError(ShallowdraftError):
    """A Ray cluster that is not there, or that loses its workers."""


class MemoryShortageError(ShallowdraftError):
    """Weights or caches that do not fit into the memory there is."""


class NumericsError(ShallowdraftError):
    """A model that produced NaN or infinite logits."""

    @classmethod
    def of(cls, models: str) -> "NumericsError":
        """The error of models named like this."""
        return cls(f"{models} produced NaN or infinite logits; check the weights, or use --dtype float32 or bfloat16")


class ServerError(ShallowdraftError):
    """A server that is not there, refuses, breaks off or speaks another protocol."""
