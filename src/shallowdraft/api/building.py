"""Build models: pretrain, prune, distill, train_heads.

All take the options of training: `corpus`, a folder of text by domain, or what the package `datasets` saved; `out`, the
folder for the model; `tokens` to train on; `batch_tokens` and `sequence`, the size of a batch and of its rows;
`learning_rate`, by default what the model's width suggests; `seed`; `compile`, to train through torch.compile;
`recompute`, to save memory by computing activations twice. Those that distil also take: `objective`; `generated`, the
tokens that the target writes itself, and `generated_share`, their share of every batch; `rollout`, the share of rows in
which the draft writes the second half.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from shallowdraft.building.following import following_training, saying_once
from shallowdraft.building.output_folder import BuildResult
from shallowdraft.building.pruning_stage import Method
from shallowdraft.building.recipe import DistillationOptions, TrainingOptions
from shallowdraft.display.progress import Progress

Options = TypeVar("Options", bound=TrainingOptions)


def _options(kind: type[Options], arguments: Mapping[str, Any]) -> Options:
    """Return the options of training among the arguments of a function."""
    return kind(**{field.name: arguments[field.name] for field in fields(kind) if field.name in arguments})


def pretrain(
    corpus: str | Path,
    out: str | Path,
    *,
    shape: str,
    tokens: int,
    tokenizer: str | None = None,
    vocab: int = 8192,
    context: int = 2048,
    batch_tokens: int = 16384,
    sequence: int = 256,
    learning_rate: float | None = None,
    seed: int = 0,
    compile: bool = False,  # noqa: A002
    recompute: bool = False,
    device: str | None = None,
    progress: Progress = True,
) -> BuildResult:
    """Train a model from scratch on a folder of text.

    shape: layers x d_model / heads / ffn, like 4x256/4h/688.
    tokenizer: a folder with one; by default a byte-level BPE tokenizer of `vocab` tokens is trained on the corpus.
    context: the longest text that the model is made for.
    """
    from shallowdraft.building import stages

    options = _options(TrainingOptions, locals())
    return stages.pretrain(
        shape=shape,
        corpus=corpus,
        out=out,
        options=options,
        tokenizer=tokenizer,
        vocab=vocab,
        context=context,
        device=device,
        follow=following_training(progress),
        say=saying_once(progress),
    )


def prune(
    parent: str,
    shape: str,
    corpus: str | Path,
    out: str | Path,
    *,
    tokens: int,
    method: Method = "importance",
    probe: float = 0.1,
    mask_tokens: float = 0.5,
    objective: str = "forward-kl",
    generated: int = 0,
    generated_share: float = 1.0,
    rollout: float = 0.0,
    batch_tokens: int = 16384,
    sequence: int = 256,
    learning_rate: float | None = None,
    seed: int = 0,
    compile: bool = False,  # noqa: A002
    recompute: bool = False,
    device: str | None = None,
    progress: Progress = True,
) -> BuildResult:
    """Carve a draft of exactly this shape out of a parent, and distil it on the parent.

    method: "importance" tries several sets of layers, each on a share `probe` of the tokens, and trains the best on;
    "learned" trains masks together with the parent's weights, on a share `mask_tokens` (Sheared-LLaMA).
    """
    from shallowdraft.building import pruning_stage

    options = _options(DistillationOptions, locals())
    return pruning_stage.prune(
        parent=parent,
        shape=shape,
        corpus=corpus,
        out=out,
        options=options,
        method=method,
        probe=probe,
        mask_tokens=mask_tokens,
        device=device,
        follow=following_training(progress),
        say=saying_once(progress),
    )


def distill(
    draft: str,
    target: str,
    corpus: str | Path,
    out: str | Path,
    *,
    tokens: int,
    objective: str = "forward-kl",
    generated: int = 0,
    generated_share: float = 1.0,
    rollout: float = 0.0,
    batch_tokens: int = 16384,
    sequence: int = 256,
    learning_rate: float | None = None,
    seed: int = 0,
    compile: bool = False,  # noqa: A002
    recompute: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = True,
) -> BuildResult:
    """Train a draft to agree with its target; what rises is the share of its tokens that the target accepts.

    draft: the model to begin with. dtype: the target's.
    """
    from shallowdraft.building import stages

    options = _options(DistillationOptions, locals())
    return stages.distill(
        draft=draft,
        target=target,
        corpus=corpus,
        out=out,
        options=options,
        dtype=dtype,
        device=device,
        follow=following_training(progress),
        say=saying_once(progress),
    )


def train_heads(
    target: str,
    corpus: str | Path,
    out: str | Path,
    *,
    tokens: int,
    count: int = 4,
    objective: str = "forward-kl",
    generated: int = 0,
    generated_share: float = 1.0,
    batch_tokens: int = 16384,
    sequence: int = 256,
    learning_rate: float | None = None,
    seed: int = 0,
    compile: bool = False,  # noqa: A002
    recompute: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = True,
) -> BuildResult:
    """Train `count` Medusa heads on a target, which stays as it is. dtype: the target's."""
    from shallowdraft.building import stages

    options = _options(DistillationOptions, locals())
    return stages.train_heads(
        target=target,
        corpus=corpus,
        out=out,
        options=options,
        count=count,
        dtype=dtype,
        device=device,
        follow=following_training(progress),
        say=saying_once(progress),
    )
