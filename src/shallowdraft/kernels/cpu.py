"""The C kernels of cpu.c, compiled for this processor on first use and kept in the user's cache folder.

Without gcc, decoding uses PyTorch's own operations. The structures mirror those of the same names in cpu_vectors.h.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from statistics import median

import torch

log = logging.getLogger(__name__)

QUERIES = 24  # of one head that share a reading of the KV cache
VECTORS = {"AVX512": 16, "AVX2": 8}  # floats in the widest vector of a processor; 4 on others, as in NEON
ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_new": 3, "gelu_pytorch_tanh": 3}  # the enum of cpu_vectors.h
PROBES, HANDOVERS, MULTIPLICATIONS = 3, 100, 20_000
_SOURCE = Path(__file__).with_name("cpu.c")
_FLAGS = ("-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", f"-DQUERIES={QUERIES}")


class PackedWeight(Structure):
    """Addresses and sizes of a packed weight; models/projection.py has its layout."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    )


class NormWeights(Structure):
    """Addresses of an RMSNorm's weight, or of a LayerNorm's weight and bias; null where there is no norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class LayerWeights(Structure):
    """Weights of a layer, its attention window in positions (0: none), and which of its parts are skipped."""

    _fields_ = (
        *((name, NormWeights) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, PackedWeight) for name in ("qkv", "out", "up", "down")),
        ("window", c_int64),
        ("skips", c_int64),
    )


class DecoderWeights(Structure):
    """Sizes and weights of a decoder's layers and final norm, without embedding and head."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "layers", "d_model", "heads", "kv_heads", "head_dim", "ffn", "gated", "activation", "post_norm",
            )
        ),
        ("eps", c_float),
        ("layer", POINTER(LayerWeights)),
        ("final", NormWeights),
    )  # fmt: skip


class TreeNodes(Structure):
    """Addresses of the tensors of a `models.tree.TreePass`."""

    _fields_ = (("base", c_void_p), ("nodes", c_void_p), ("seen", c_void_p), ("depths", c_void_p))


@cache
def lanes() -> int:
    """Return the floats in a vector; a panel of weights holds two vectors of outputs."""
    return VECTORS.get(torch.backends.cpu.get_cpu_capability(), 4)


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None with a warning where they cannot be built; both once per process."""
    compiler = shutil.which("gcc")  # its OpenMP is PyTorch's own; threads of a second one would compete for the cores
    if compiler is None:
        log.warning("gcc not found: decoding on the CPU uses PyTorch's operations and is slower; install gcc")
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip().splitlines()[-1] if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("the CPU kernels cannot be built (%s): decoding uses PyTorch's operations and is slower", reason)
        return None
    _declare(loaded)
    return loaded


def _declare(loaded: ctypes.CDLL) -> None:
    """Tell ctypes the arguments and results of the functions in cpu.c."""
    pointer, number = c_void_p, c_int64
    loaded.forward.argtypes = (
        POINTER(DecoderWeights), pointer, pointer, POINTER(TreeNodes), number, number,
        pointer, number, pointer, pointer, pointer, number,
    )  # fmt: skip
    loaded.product.argtypes = (POINTER(PackedWeight), pointer, number, pointer, number)
    loaded.decode.argtypes = (
        POINTER(DecoderWeights), pointer, number, POINTER(PackedWeight), number,
        pointer, pointer, number, number, number, pointer, pointer,
        pointer, number, pointer, pointer, pointer, pointer, pointer, number,
    )  # fmt: skip
    loaded.commit_greedy.argtypes = (
        POINTER(DecoderWeights), pointer, number, POINTER(PackedWeight),
        pointer, pointer, number, number, pointer, number, pointer, pointer, number, pointer,
        pointer, number, pointer, pointer, pointer, pointer, pointer, number,
    )  # fmt: skip
    loaded.handover.argtypes, loaded.handover.restype = (number,), c_double
    loaded.arithmetic.argtypes, loaded.arithmetic.restype = (number, number), c_double
    for name in ("forward", "product", "decode", "commit_greedy"):
        getattr(loaded, name).restype = None


def probe(threads: int) -> tuple[float, float]:
    """Measure the cores: seconds to hand a cache line from one to another, and seconds of a fixed piece of arithmetic.

    The first tells where a hypervisor has placed the cores, the second whether another process computes on them. Both
    are 0 if unknown. Call it right after a parallel region, while its threads still spin in wait for the next one.
    """
    kernels = library()
    if kernels is None or threads < 2:
        return 0.0, 0.0
    handovers = [kernels.handover(HANDOVERS) for _ in range(PROBES)]
    return min(handovers), median(kernels.arithmetic(MULTIPLICATIONS, threads) for _ in range(PROBES))


def _built(compiler: str) -> Path:
    """Return the library for this source, compiler and processor; compile it if it is not in the cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shallowdraft"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = (*_FLAGS, f"-DLANES={lanes()}")
    sources = [path.read_text() for path in (_SOURCE, *sorted(_SOURCE.parent.glob("cpu_*.h")))]
    key = "\n".join((*sources, " ".join(flags), version, _processor()))
    path = folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled = Path(scratch) / path.name
            command = [compiler, *flags, "-o", str(compiled), str(_SOURCE), "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True)
            compiled.replace(path)  # in one step: another process may compile the same
    return path


def _processor() -> str:
    """Return what -march=native depends on: machines of different kinds may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
