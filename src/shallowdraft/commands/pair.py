"""shallowdraft pair: make a target and a draft with a chosen agreement, without training."""

import json
from dataclasses import dataclass
from pathlib import Path

from shallowdraft.commands.options import Json, ModelCommand, Number, Seed
from shallowdraft.errors import OptionError
from shallowdraft.portable import require_portable
from shallowdraft.shapes.notation import parse_shape


@dataclass(frozen=True, kw_only=True)
class PairCommand(ModelCommand):
    """Make a synthetic target and draft that agree on a chosen share of tokens: full work, known output, no training.

    Example: shallowdraft pair --target-shape 11x640/10h/1728 --draft-shape 2x256/4h/688 --agreement 0.8 --out pair
    """

    target_shape: str
    """layers x d_model / heads / ffn like 11x640/10h/1728 (with /8kv and /128hd where needed); a T5 has the layers of
    its encoder first, like 6+12x640/10h/1728; or a known name."""
    draft_shape: str
    """The draft's shape, written likewise."""
    out: str
    """Folder to make; the models go into OUT/target and OUT/draft."""
    agreement: float = 0.8
    """Share of tokens on which the two agree, 0 to 1."""
    vocab: int = 4096
    """Tokens in the vocabulary. There are at least 320."""
    context: Number = None
    """Longest text that the models are made for, in tokens. Default: 2048, or the named shape's own."""
    seed: Seed = 0
    json_output: Json = False
    """Print {"target", "draft", "agreement", "tar"} and nothing else on stdout."""

    def run(self) -> int:
        from shallowdraft.models.model import resolve_device, resolve_dtype
        from shallowdraft.models.synthetic import make_pair

        self.set_threads()
        dtype = resolve_dtype(self.dtype or "float32", resolve_device(self.device))
        if not self.out:
            raise OptionError("--out is empty; name a folder to make")
        if self.context is not None and self.context < 2:
            raise OptionError(f"context is {self.context}; it must be at least 2")
        out = Path(self.out)
        if any((out / role).exists() for role in ("target", "draft")):
            raise OptionError(f"{out} already holds a target or a draft; name another folder")
        target, draft = (
            parse_shape(shape, vocab=self.vocab, context=self.context)
            for shape in (self.target_shape, self.draft_shape)
        )
        for shape in (target, draft):
            require_portable(shape)
        pair = make_pair(target, draft, self.agreement, seed=self.seed).to(dtype)
        folders = dict(zip(("target", "draft"), pair.save(out), strict=True))
        tars = {lookahead: pair.tar(lookahead) for lookahead in (1, 3, 5, 7)}
        agreement = float(pair.agrees.double().mean())
        if self.json_output:
            print(
                json.dumps({name: str(path) for name, path in folders.items()} | {"agreement": agreement, "tar": tars})
            )
            return 0
        for role, model in (("target", pair.target), ("draft", pair.draft)):
            print(f"{role}: {folders[role]} ({model.shape}, {model.shape.parameters:,} parameters)")
        figures = ", ".join(f"{tar:.2f} at lookahead {lookahead}" for lookahead, tar in tars.items())
        print(f"agreement {agreement:.1%}; TAR {figures}")
        return 0
