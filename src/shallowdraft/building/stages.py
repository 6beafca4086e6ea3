"""Stages of building a draft: `pretrain`, `distill`, `train_heads`; `prune` is in pruning_stage.py.

A stage does the whole job, from paths and options to a saved model: it checks its input, opens or writes the token
store, loads models, trains, measures, saves and returns what it wrote. The same call continues an unfinished run, and
returns the result of a finished one again. Under torchrun all processes make the same call and share the work. Nothing
is printed: `follow` gets the progress and `say` sentences for the user.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shallowdraft.building import data_parallel
from shallowdraft.building.corpus import read_corpus
from shallowdraft.building.medusa import fit_heads
from shallowdraft.building.output_folder import BuildResult, OutputFolder
from shallowdraft.building.recipe import DistillationOptions, TrainingOptions
from shallowdraft.building.stage_steps import (
    distil,
    finish_model,
    finished_earlier,
    join_processes,
    new_trainer,
    output_folder,
    with_generated_text,
)
from shallowdraft.building.tasks import Pretraining, require_objective
from shallowdraft.building.tokenizer import train_tokenizer
from shallowdraft.building.training import fresh_decoder
from shallowdraft.distributed import is_first, launched
from shallowdraft.errors import OptionError, VocabularyError
from shallowdraft.limits import MOST_HEADS
from shallowdraft.models.checkpoint import require_decoder_only
from shallowdraft.models.heads import save_heads
from shallowdraft.models.model import Model, check_vocabulary, load
from shallowdraft.models.vocabulary import load_tokenizer, save_tokenizer
from shallowdraft.portable import require_portable
from shallowdraft.progress import Follow, Say, run_silently, say_nothing
from shallowdraft.shapes.notation import parse_shape


def pretrain(
    *,
    shape: str,
    corpus: str | Path,
    out: str | Path,
    options: TrainingOptions,
    tokenizer: str | None = None,
    vocab: int = 8192,
    context: int = 2048,
    device: str | None = None,
    follow: Follow = run_silently,
    say: Say = say_nothing,
) -> BuildResult:
    """Train a model from scratch on a folder of text.

    `tokenizer` names a folder with one; without it a byte-level BPE tokenizer of `vocab` tokens is trained on the
    corpus.
    """
    begin_s = time.perf_counter()
    # Weights are trained in float32; run.json has the field in all stages.
    own = {"shape": shape, "tokenizer": tokenizer, "vocab": vocab, "context": context, "dtype": None}
    folder = output_folder(out, corpus, options, own)
    if result := finished_earlier(folder, say):
        return result
    if context < options.sequence:
        raise OptionError(f"--sequence is {options.sequence}, longer than the model's --context of {context}")
    model_shape = replace(parse_shape(shape, context=context), tied=True)
    if model_shape.encoder:
        raise OptionError(f"--shape is {shape}, an encoder–decoder; only decoder-only models are trained here")
    require_portable(model_shape)
    torch_device = join_processes(folder, device)
    used_tokenizer = _tokenizer(folder, corpus, tokenizer, vocab)
    model_shape = replace(model_shape, vocab=len(used_tokenizer))
    trainer = new_trainer(folder, corpus, used_tokenizer, options, follow, say)
    folder.start()
    decoder = fresh_decoder(model_shape, options.seed).to(torch_device)
    trainer.train("pretrain", decoder, Pretraining(), options.recipe(model_shape))
    held_out = trainer.validate(decoder, None, options.sequence)
    decoder = data_parallel.gather_model(decoder)
    model = Model(str(out), decoder, used_tokenizer, (used_tokenizer.eos_token_id,))
    return finish_model(folder, model, held_out, begin_s)


def distill(
    *,
    draft: str,
    target: str,
    corpus: str | Path,
    out: str | Path,
    options: DistillationOptions,
    dtype: str | None = None,
    device: str | None = None,
    follow: Follow = run_silently,
    say: Say = say_nothing,
) -> BuildResult:
    """Train a draft to agree with its target; `dtype` is the target's."""
    begin_s = time.perf_counter()
    folder = output_folder(out, corpus, options, {"draft": draft, "target": target, "dtype": dtype})
    if result := finished_earlier(folder, say):
        return result
    require_objective(options.objective, options.rollout)
    require_decoder_only(target, draft)
    torch_device = join_processes(folder, device)
    teacher = load(target, dtype, torch_device, trainable=True)
    student = load(draft, "float32", torch_device, trainable=True)
    check_vocabulary(teacher, student).require()
    trainer = new_trainer(folder, corpus, teacher.require_tokenizer(), options, follow, say)
    folder.start()
    decoder, held_out = distil(trainer, folder, student.decoder, teacher, options, options.tokens)
    return finish_model(folder, replace(student, name=str(out), decoder=decoder), held_out, begin_s)


def train_heads(
    *,
    target: str,
    corpus: str | Path,
    out: str | Path,
    options: DistillationOptions,
    count: int = 4,
    dtype: str | None = None,
    device: str | None = None,
    follow: Follow = run_silently,
    say: Say = say_nothing,
) -> BuildResult:
    """Train `count` Medusa heads on a target, which stays as it is; `dtype` is the target's."""
    begin_s = time.perf_counter()
    folder = output_folder(out, corpus, options, {"target": target, "count": count, "dtype": dtype})
    if result := finished_earlier(folder, say):
        return result
    require_objective(options.objective, options.rollout)
    if not 1 <= count <= MOST_HEADS:
        raise OptionError(f"--count is {count}; it must be from 1 to {MOST_HEADS}")
    if options.rollout:
        raise OptionError("--rollout is for drafts; heads learn from the target's text")
    if count >= options.sequence:
        raise OptionError(f"--sequence is {options.sequence}; {count} heads need longer ones")
    if launched() > 1:
        raise OptionError("heads are small and trained by one process; leave torchrun out")
    require_decoder_only(target)
    torch_device = join_processes(folder, device)
    model = load(target, dtype, torch_device, trainable=True)
    trainer = new_trainer(folder, corpus, model.require_tokenizer(), options, follow, say)
    trainer = with_generated_text(trainer, folder, model, options)
    folder.start()
    heads, held_out = fit_heads(trainer, model.decoder, count, options.recipe(model.shape), options.objective)
    figures = {name: round(value, 4) for name, value in held_out.items()}
    config = {"target": target, "objective": options.objective, "tokens": options.tokens, "held_out": figures}
    parameters, seconds = sum(weight.numel() for weight in heads.parameters()), time.perf_counter() - begin_s
    result = BuildResult(folder.path, f"{count} heads on {target}", {"heads": count}, parameters, held_out, seconds)
    return folder.finish(result, lambda: save_heads(heads, folder.path, **config))


def _tokenizer(folder: OutputFolder, corpus: str | Path, name: str | None, vocab: int) -> Any:
    """Load the named tokenizer, or the one that this run has trained before, or train one."""
    own = folder.work / "tokenizer"
    if name is not None:
        loaded = load_tokenizer(Path(name))
        if loaded is None:
            raise VocabularyError(f"{name} holds no tokenizer; name a folder with tokenizer.json")
        return loaded
    trained = load_tokenizer(own) if folder.started else None
    if trained is None and is_first():
        documents = read_corpus(Path(corpus))
        save_tokenizer(train_tokenizer((text for _, part, text in documents if part == "train"), vocab), own)
    data_parallel.wait_for_all()
    return trained or load_tokenizer(own)
