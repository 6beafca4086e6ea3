"""The exceptions that a user can cause; each message says what was got, what is needed and what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, safe to print."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(text: str) -> str:
    """Replace the characters that a terminal would not show, such as escape sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


class ShallowdraftError(Exception):
    """An error that the user can correct; the command line prints it in one line and exits with 2."""


class OptionError(ShallowdraftError):
    """An option or argument outside its range."""


class CheckpointError(ShallowdraftError):
    """A checkpoint that is missing, incomplete, corrupt or not what its config says."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint of a family or format that this package does not run."""


class VocabularyError(ShallowdraftError):
    """A tokenizer that is missing, or a draft whose vocabulary is not its target's."""


class PromptError(ShallowdraftError):
    """A prompt that is empty, has unknown token ids or does not fit into the context."""


class CorpusError(ShallowdraftError):
    """Text for training that is missing, unreadable, empty or of another tokenizer."""


class TrainingError(ShallowdraftError):
    """A training run that diverged, or a checkpoint that belongs to another run."""


class RecordError(ShallowdraftError):
    """A file of measurements that is missing, of another kind, another model or another machine."""


class ClusterError(ShallowdraftError):
    """A Ray cluster that cannot be reached, or that loses its workers."""


class MemoryShortageError(ShallowdraftError):
    """Weights or caches that do not fit into memory."""


class NumericsError(ShallowdraftError):
    """A model that produced NaN or infinite logits."""

    @classmethod
    def of(cls, models: str) -> "NumericsError":
        """Return the error for the models of this description."""
        return cls(f"{models} produced NaN or infinite logits; check the weights, or use --dtype float32 or bfloat16")


class ServerError(ShallowdraftError):
    """A server that cannot be reached, refuses a request, breaks off or speaks another protocol."""
