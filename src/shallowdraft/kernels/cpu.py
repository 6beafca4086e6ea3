"""Builds and loads cpu.c, once a machine. Without a C compiler everything runs on PyTorch's own operations instead."""

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

QUERIES = 24
VECTORS = {"AVX512": 16, "AVX2": 8}  # floats in the widest of a processor; elsewhere 4, as in NEON
ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_new": 3, "gelu_pytorch_tanh": 3}
PROBES, HANDOVERS, MULTIPLICATIONS = 3, 100, 20_000
_SOURCE = Path(__file__).with_name("cpu.c")
_FLAGS = ("-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", f"-DQUERIES={QUERIES}")


class Product(Structure):
    """A packed weight; see models/projection.py for its layout."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    )


class Norm(Structure):
    """RMSNorm, or LayerNorm where there is a bias; nothing where there is no weight."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Layer(Structure):
    """The weights of a block."""

    _fields_ = (
        *((name, Norm) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, Product) for name in ("qkv", "out", "up", "down")),
        ("window", c_int64),
        ("skips", c_int64),
    )


class Model(Structure):
    """Sizes and weights of a decoder without embedding and head."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "layers", "d_model", "heads", "kv_heads", "head_dim", "ffn", "gated", "activation", "post_norm",
            )
        ),
        ("eps", c_float),
        ("layer", POINTER(Layer)),
        ("final", Norm),
    )  # fmt: skip


class Tree(Structure):
    """Nodes of a pass: where node 0 stands, which they are, what each sees, the depths of all."""

    _fields_ = (("base", c_void_p), ("nodes", c_void_p), ("seen", c_void_p), ("depths", c_void_p))


@cache
def lanes() -> int:
    """Floats in a vector; a panel of weights holds twice as many outputs."""
    return VECTORS.get(torch.backends.cpu.get_cpu_capability(), 4)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be built; said once."""
    compiler = shutil.which("gcc")  # its OpenMP is the one that PyTorch brings; a second one would fight for the cores
    if compiler is None:
        log.warning("gcc not found: decoding on the CPU uses PyTorch's operations and is slower; install gcc")
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip().splitlines()[-1] if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("the CPU kernels cannot be built (%s): decoding uses PyTorch's operations and is slower", reason)
        return None
    pointer, number = c_void_p, c_int64
    loaded.forward.argtypes = (
        POINTER(Model), pointer, pointer, POINTER(Tree), number, number,
        pointer, number, pointer, pointer, pointer, number,
    )  # fmt: skip
    loaded.product.argtypes = (POINTER(Product), pointer, number, pointer, number)
    loaded.decode.argtypes = (
        POINTER(Model), pointer, number, POINTER(Product), number,
        pointer, pointer, number, number, number, pointer, pointer,
        pointer, number, pointer, pointer, pointer, pointer, pointer, number,
    )  # fmt: skip
    loaded.settle.argtypes = (
        POINTER(Model), pointer, number, POINTER(Product),
        pointer, pointer, number, number, pointer, number, pointer, pointer, number, pointer,
        pointer, number, pointer, pointer, pointer, pointer, pointer, number,
    )  # fmt: skip
    loaded.handover.argtypes, loaded.handover.restype = (number,), c_double
    loaded.arithmetic.argtypes, loaded.arithmetic.restype = (number, number), c_double
    for name in ("forward", "product", "decode", "settle"):
        getattr(loaded, name).restype = None
    return loaded


def probe(threads: int) -> tuple[float, float]:
    """Seconds in which a core hands a cache line to another, and of a fixed piece of arithmetic; 0 if unknown.

    The one tells where a hypervisor has put the cores, the other whether somebody computes on them beside us. To be
    asked while the threads of a parallel region still wait for the next one.
    """
    kernels = library()
    if kernels is None or threads < 2:
        return 0.0, 0.0
    handovers = [kernels.handover(HANDOVERS) for _ in range(PROBES)]
    return min(handovers), median(kernels.arithmetic(MULTIPLICATIONS, threads) for _ in range(PROBES))


def _built(compiler: str) -> Path:
    """The shared library for this source, compiler and processor, compiled if it is not in the user's cache yet."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shallowdraft"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags = (*_FLAGS, f"-DLANES={lanes()}")
    sources = [path.read_text() for path in (_SOURCE, *sorted(_SOURCE.parent.glob("cpu_*.h")))]
    key = "\n".join((*sources, " ".join(flags), version, _processor()))
    path = folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *flags, "-o", str(made), str(_SOURCE), "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True)
            made.replace(path)
    return path


def _processor() -> str:
    """What -march=native depends on; a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
