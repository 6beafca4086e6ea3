"""Kernels for decoding: C for a CPU, Triton for a GPU. Each has a reference in PyTorch that it is tested against.

`cpu` builds and loads the C code. `gpu` launches products and attention, `gpu_choice` launches sampling and
verification; the Triton code of the two is in `gpu_jit` and `gpu_choice_jit`.
"""
