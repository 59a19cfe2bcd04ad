"""The device on which a process computes."""

import os

import torch

from stillhouse.parallel.ranks import local_rank, process_count


def choose_device(name: str) -> torch.device:
    """Return the device with this name: auto, cpu, mps, cuda or cuda:N.

    auto: a CUDA device, else Apple's GPU (MPS, for a single process), else the CPU. Raises ValueError for a device
    that this machine does not have, or that several processes cannot share.

    From then on, CUDA convolutions of float32, which vision towers have, are in full precision: by default, torch
    rounds their operands to TF32, but not those of matrix products.
    """
    if name == "auto":
        has_mps = torch.backends.mps.is_available() and process_count() == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    device, processes = torch.device(name), process_count()
    if device.type == "mps" and processes > 1:
        raise ValueError(f"got mps for {processes} processes, which cannot share it: expected cpu, or one process")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("got mps, but this machine has no such GPU: expected auto or cpu")
    if device.type != "cuda":
        return device
    if processes > 1 and device.index not in (None, local_rank()):
        raise ValueError(
            f"got {name} for {processes} processes: expected cuda, so that each process gets another GPU"
        )
    if device.index is None:
        device = torch.device("cuda", local_rank())
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ValueError(f"got {name}, but this machine has {count} CUDA devices: expected auto or cpu")
    torch.backends.cudnn.allow_tf32 = False
    return device


def best_precision(device: torch.device) -> str:
    """Return the precision that `auto` means: bf16 on GPUs that compute bf16 in hardware, else fp32."""
    has_units = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_units else "fp32"


def use_deterministic_algorithms() -> None:
    """For the rest of this process, let torch raise an error for an algorithm that may give other bits again."""
    # cuBLAS reads it before its first product; torch requires it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
