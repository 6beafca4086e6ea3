"""shallowdraft pretrain: a model from scratch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shallowdraft.commands.options import Name
from shallowdraft.commands.training import TrainingCommand
from shallowdraft.errors import OptionError
from shallowdraft.portable import require_portable
from shallowdraft.shapes.notation import parse_shape


@dataclass(frozen=True, kw_only=True)
class PretrainCommand(TrainingCommand):
    """Train a model from scratch on a folder of text.

    Example: shallowdraft pretrain --corpus text --shape 4x256/4h/688 --vocab 4096 --tokens 5000000 --out model
    """

    shape: str
    """layers x d_model / heads / ffn like 4x256/4h/688, with /2kv and /64hd where needed."""
    tokenizer: Name = None
    """Folder with a tokenizer to use. Default: a byte-level BPE tokenizer trained on the corpus."""
    vocab: int = 8192
    """Tokens of a tokenizer that is trained here."""
    context: int = 2048
    """Longest text that the model is made for."""

    def build(self) -> int:
        from shallowdraft.building import data_parallel, jobs
        from shallowdraft.building.training import fresh_decoder
        from shallowdraft.models.model import Model

        self.require_float32()
        if self.context < self.sequence:
            raise OptionError(f"--sequence is {self.sequence}, longer than the model's --context of {self.context}")
        shape = replace(parse_shape(self.shape, context=self.context), tied=True)
        if shape.encoder:
            raise OptionError(f"--shape is {self.shape}, an encoder–decoder; only decoder-only models are trained here")
        require_portable(shape)
        device = self.start()
        tokenizer = self._tokenizer()
        shape = replace(shape, vocab=len(tokenizer))
        shop = self.workshop(tokenizer)
        self.begin()
        decoder = fresh_decoder(shape, self.seed).to(device)
        shop.train("pretrain", decoder, jobs.Pretrain(), self.recipe(shape))
        measured = shop.validate(decoder, None, self.sequence)
        model = Model(self.out, data_parallel.gathered(decoder), tokenizer, (tokenizer.eos_token_id,))
        return self.finish(model, measured)

    def _tokenizer(self) -> Any:
        """The given one, the one of an earlier start, or one trained now."""
        from shallowdraft.building import data_parallel
        from shallowdraft.building.corpus import read_corpus
        from shallowdraft.building.tokenizer import train_tokenizer
        from shallowdraft.errors import VocabularyError
        from shallowdraft.models.vocabulary import load_tokenizer, save_tokenizer

        kept = self.work / "tokenizer"
        given = self.tokenizer or (kept if self.resumes else None)
        found = load_tokenizer(Path(given)) if given else None
        if found is None and self.tokenizer:
            raise VocabularyError(f"{self.tokenizer} holds no tokenizer; name a folder with tokenizer.json")
        if found is None and data_parallel.is_first():
            documents = read_corpus(Path(self.corpus))
            made = train_tokenizer((text for _, part, text in documents if part == "train"), self.vocab)
            save_tokenizer(made, kept)
        data_parallel.wait()
        return found or load_tokenizer(kept)
