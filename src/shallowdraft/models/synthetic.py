"""Models without training: random weights, and pairs of a target and a draft with a chosen share of agreement.

In a pair every kernel does its full work, yet the right output is known: the outputs of attention and FFN are scaled
down until the residual stream is the token's embedding, and the head is set so that greedy decoding follows a fixed
permutation of the vocabulary, `head[successor[x]] = embedding[x]`. The permutation is one cycle, so no text repeats
before the vocabulary is used up. The draft follows the same permutation for a chosen share of the tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shallowdraft.errors import OptionError
from shallowdraft.models.cache import EncoderInput
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder
from shallowdraft.models.memory import dtype_name, require_memory
from shallowdraft.models.model import Model, resolve_dtype
from shallowdraft.models.projection import best_packing
from shallowdraft.shapes.shape import ModelShape, require_one_kind

SMALLEST_VOCABULARY = 320  # 256 bytes, so that any prompt can be encoded, and some words
TRIED_TOKENS = 32  # tokens that a new model is checked with
_DAMPING = 1e-3  # of weights that write to the residual stream


@dataclass(frozen=True)
class SyntheticPair:
    """A target, a draft, and the tokens that they agree on."""

    target: Model
    draft: Model
    successor: Tensor
    """[V] the target's next token after each token."""
    agrees: Tensor
    """[V] whether the draft's next token is the same."""

    def walk(self, token: int, length: int) -> list[int]:
        """Return the target's greedy continuation of any prompt that ends with `token`.

        An encoder–decoder's continuation follows its start token.
        """
        tokens = [token]
        for _ in range(length):
            tokens.append(int(self.successor[tokens[-1]]))
        return tokens[1:]

    def tar(self, lookahead: int) -> float:
        """Return the TAR over one walk round the whole cycle, computed from the agreement of each token."""
        vocab = len(self.successor)
        agrees = [bool(self.agrees[token]) for token in self.walk(0, vocab)]
        position = iterations = 0
        while position < vocab:
            accepted = 0
            while accepted < lookahead and agrees[(position + accepted) % vocab]:
                accepted += 1
            position += accepted + 1
            iterations += 1
        return position / iterations

    def to(self, dtype: torch.dtype) -> "SyntheticPair":
        """Convert both models to another precision."""
        self.target.decoder.to(dtype)
        self.draft.decoder.to(dtype)
        return self

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both models as Hugging Face folders, `target` and `draft`."""
        self.target.save(folder / "target")
        self.draft.save(folder / "draft")
        return folder / "target", folder / "draft"


def make_pair(
    target: ModelShape,
    draft: ModelShape,
    agreement: float,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SyntheticPair:
    """Make a pair of these shapes that agrees on a share of the vocabulary, rounded to whole tokens.

    A tied head cannot follow a permutation; its shape gets a separate head.
    """
    target, draft = replace(target, tied=False), replace(draft, tied=False)
    if target.vocab != draft.vocab or target.vocab < SMALLEST_VOCABULARY:
        raise OptionError(
            f"the vocabularies are {target.vocab:,} and {draft.vocab:,}; "
            f"a synthetic pair needs one of at least {SMALLEST_VOCABULARY}"
        )
    require_one_kind(target, draft)
    if not 0 <= agreement <= 1:
        raise OptionError(f"agreement is {agreement}; it must be 0 to 1")
    if not 0 <= seed < 2**63:
        raise OptionError(f"seed is {seed}; it must be 0 or more and fit into 63 bits")
    copies = 2 if torch.device(device).type == "cpu" else 1  # saving needs a second one
    size = copies * (target.parameters + draft.parameters) * dtype.itemsize
    require_memory(size, torch.device(device), "making this pair")
    random = torch.Generator().manual_seed(seed)
    successor = _full_cycle(target.vocab, random)
    differing = torch.randperm(target.vocab, generator=random)[: round((1 - agreement) * target.vocab)]
    draft_successor = successor.clone()
    draft_successor[differing] = successor[differing.roll(1)]
    agrees = draft_successor == successor
    tokenizer = byte_tokenizer(target.vocab)
    if torch.device(device).type != "cpu":
        random = torch.Generator(device).manual_seed(seed)
    return SyntheticPair(
        Model("synthetic target", _follower(target, successor, random, dtype), tokenizer),
        Model("synthetic draft", _follower(draft, draft_successor, random, dtype), tokenizer),
        successor,
        agrees,
    )


def _check_follows(decoder: Decoder, successor: Tensor) -> None:
    """Raise if tokens have wrong successors: a model far too narrow for its vocabulary cannot tell them apart."""
    tokens = torch.arange(0, len(successor), -(-len(successor) // TRIED_TOKENS))[:, None]
    with torch.inference_mode():
        cache, moved = decoder.new_cache(len(tokens), 1), tokens.to(decoder.device)
        decoder.read_source(EncoderInput(moved, torch.ones_like(moved[:, 0])), cache)
        choice = decoder.head(decoder(moved, torch.zeros_like(moved), cache, 1)).argmax(-1).cpu()
    if not torch.equal(choice, successor[tokens]):
        raise OptionError(
            f"a d_model of {decoder.shape.d_model} is too narrow for a vocabulary of {len(successor):,}; "
            "make it wider or the vocabulary smaller"
        )


def random_decoder(shape: ModelShape, *, seed: int = 0, scale: float = 1.0) -> Decoder:
    """Make a decoder of random weights with variance scale / columns, whose output depends on the whole context."""
    random = torch.Generator().manual_seed(seed)
    return assemble(shape, {name: _random_parameter(name, size, scale, random) for name, size in _sizes(shape).items()})


def random_precision(shape: ModelShape, like: Model, dtype: str | None) -> str:
    """Return the precision of `random_draft`'s weights for the same arguments: int8 or a dtype's name."""
    if dtype == "int8" or (dtype is None and best_packing(shape, torch.float32, like.device) == "panels"):
        return "int8"
    return dtype_name(resolve_dtype(dtype, like.device))


def random_draft(name: str, shape: ModelShape, like: Model, dtype: str | None = None) -> Model:
    """Make a model that takes the time of a draft of this shape for a target `like`; `dtype` is as in `load_draft`."""
    decoder = random_decoder(shape)
    int8 = random_precision(shape, like, dtype) == "int8"
    decoder.to(like.device, resolve_dtype(None if int8 else dtype, like.device)).pack("int8" if int8 else None)
    # Times depend on the shape, which the name tells, not on the weights: the name serves as the digest.
    return Model(name, decoder, like.tokenizer, checkpoint_digest=name)


def byte_tokenizer(vocab: int) -> Any:
    """Make a tokenizer of 256 bytes and invented words: it encodes any text, and decoded output reads like words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [f"\u0120{_word(index)}" for index in range(vocab - len(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _word(index: int) -> str:
    """Return a distinct pronounceable word for each index: syllables are its digits, at least two of them."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    base, word = len(consonants) * len(vowels), ""
    while index or len(word) < 4:
        index, digit = divmod(index, base)
        word += consonants[digit // len(vowels)] + vowels[digit % len(vowels)]
    return word


def _full_cycle(size: int, random: torch.Generator) -> Tensor:
    """Return a permutation of `size` elements that is a single cycle."""
    order = torch.randperm(size, generator=random)
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    return successor


def _follower(shape: ModelShape, successor: Tensor, random: torch.Generator, dtype: torch.dtype) -> Decoder:
    """Make a decoder of this shape whose greedy choice after x is successor[x]."""
    state = {}
    for name, size in _sizes(shape).items():
        tensor = _random_parameter(name, size, 1.0, random)
        if name.split(".")[-2] in ("out", "cross_out", "down", "positions"):
            tensor.mul_(_DAMPING)
        state[name] = tensor if name.startswith(("embed.", "head.", "project_")) else tensor.to(dtype)
    # Vectors of equal length and mean 0: each is closest to itself, after either kind of norm.
    embedding = torch.nn.functional.layer_norm(state["embed.weight"], (shape.embed_dim,))
    state["embed.weight"] = embedding
    state["head.weight"][successor.to(random.device)] = embedding / shape.embed_dim**0.5
    if "project_in.weight" in state:  # an orthogonal matrix and its inverse, which keep the mean at 0
        weight = state["project_in.weight"]
        state["project_in.weight"] = torch.linalg.qr(weight - weight.mean(0)).Q
        state["project_out.weight"] = state["project_in.weight"].T.contiguous()
    decoder = assemble(shape, {name: tensor.to(dtype) for name, tensor in state.items()})
    _check_follows(decoder, successor)
    return decoder


def _sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the size of every parameter; its stored parts are stacked along the first dimension."""
    return {name: (sum(part.size[0] for part in parts), *parts[0].size[1:]) for name, parts in shape.layout().items()}


def _random_parameter(name: str, size: tuple[int, ...], scale: float, random: torch.Generator) -> Tensor:
    """Return a random matrix, ones for a norm, or zeros for a bias."""
    if len(size) == 1:
        return torch.full(size, float(name.endswith("norm.weight")), device=random.device)
    deviation = 1.0 if name.startswith("embed.") else (scale / size[1]) ** 0.5
    return torch.randn(size, generator=random, device=random.device).mul_(deviation)
