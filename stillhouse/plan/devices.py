"""The devices that a plan knows: the manufacturers' figures, and the shares of these figures that kernels reach.

Peaks, bandwidths and memory are those of the SXM modules and of the RTX 4090 (with sums in float32). The shares were
measured on one H100 (`docs/gpu.md`) and are assumed for the other devices.
"""

from dataclasses import dataclass
from types import SimpleNamespace

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """The figures of a device, in bytes, seconds and floating-point operations.

    capability, multiprocessors, memory: the values that torch reports; `memory` is the total memory.
    bfloat16, float32: the peak of dense matrix products, in operations per second.
    bandwidth: the bandwidth of the memory. nvlink: the bandwidth of NVLink or PCI Express, in each direction.
    network: the bandwidth of one device's share of the network, in each direction.
    """

    title: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    bfloat16: float
    float32: float
    bandwidth: float
    nvlink: float
    network: float

    @property
    def usable(self) -> int:
        """The bytes of memory for tensors."""
        return self.memory - RESERVED

    def properties(self) -> SimpleNamespace:
        """Return the object that `torch.cuda.get_device_properties` returns on such a device."""
        shared = 233472 if self.capability >= (9, 0) else 102400 if self.capability == (8, 9) else 167936
        return SimpleNamespace(
            name=f"NVIDIA {self.title}",
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.multiprocessors,
            total_memory=self.memory,
            warp_size=32,
            max_threads_per_multi_processor=1536 if self.capability == (8, 9) else 2048,
            regs_per_multiprocessor=65536,
            L2_cache_size=50 << 20,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=shared - 1024,
            shared_memory_per_multiprocessor=shared,
        )


DEVICES = {
    "rtx4090": Device("RTX 4090 24 GB", (8, 9), 128, int(23.6 * GIB), 165e12, 82.6e12, 1.01e12, 32e9, 12.5e9),
    "a100": Device("A100 80 GB", (8, 0), 108, int(79.1 * GIB), 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
    "h100": Device("H100 80 GB", (9, 0), 132, int(79.1 * GIB), 989e12, 67e12, 3.35e12, 450e9, 50e9),
    "h200": Device("H200 141 GB", (9, 0), 132, int(139.8 * GIB), 989e12, 67e12, 4.8e12, 450e9, 50e9),
    "b200": Device("B200 180 GB", (10, 0), 148, int(178.3 * GIB), 2250e12, 75e12, 8.0e12, 900e9, 50e9),
}

#: the memory of CUDA's context, of NCCL's buffers, and of gaps that are too small for a tensor
RESERVED = 3 * GIB
#: the share of the peak that large products in bfloat16 reach: 790 of 989 TFLOP/s on an H100
PRODUCTS = 0.80
#: the share of the memory's bandwidth that all other kernels of a step reach, from one profile of a step
TRAFFIC = 0.64
#: the share of the links' bandwidth that collectives of many megabytes reach (assumed)
LINKS = 0.80
#: seconds that the host needs to launch a kernel (assumed)
LAUNCH = 8e-6
#: seconds before the first byte of a message arrives, within a machine and between machines (assumed)
LATENCY, NETWORK_LATENCY = 15e-6, 30e-6
