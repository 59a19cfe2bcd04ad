"""The predicted time of a pass of the objective on an H100, from what it does on tensors without values.

    python -m benchmarks.predicted_objective        on a machine without a GPU

Counts the operations of the matrix products, the bytes that all other kernels read and write, and the launches of a
forward and backward pass. The prediction adds up the products and the bytes at rates that were measured on an H100
(docs/gpu.md), as if neither ran beside the other. It does not know how well a kernel uses the device: a compiled
function counts as one kernel that reads and writes its arguments and results once. The floor is the products alone.

T tokens, D student width, E teacher width, V vocabulary.

Writes benchmarks/results/predicted-objective-<date>.json.
"""

from stillhouse.plan.child import load_hooks

if __name__ == "__main__":
    load_hooks()  # before torch

import torch

from benchmarks.record import result_file, write_result
from stillhouse.objective import CrossEntropy, Distill, FullVocab, OutputHead, forward_kl, jsd, linear_objective
from stillhouse.plan.device_counts import DeviceCounts
from stillhouse.plan.devices import DEVICES
from stillhouse.plan.fake_cuda import FakeCudaMode, fake_cuda

T, E, V = 8192, 4096, 151936
WIDTHS = (1024, 2048)
#: measured on an H100: operations per second of a large square product, and bytes per second of a copy
PRODUCTS, COPIES = 790e12, 3.0e12
LOSSES = ("forward_kl", "jsd(0.5)", "0.3*cross_entropy + 0.7*jsd(0.5)")


def main() -> None:
    passes = {f"{loss}, D={width}": predict(loss, width) for width in WIDTHS for loss in LOSSES}
    for name, values in passes.items():
        print(name, values)
    settings = {"tokens": T, "teacher_width": E, "vocabulary": V, "products": PRODUCTS, "copies": COPIES}
    write_result(result_file("predicted-objective"), {"theme": "predicted objective", **settings, "passes": passes})


def predict(loss: str, width: int) -> dict[str, float]:
    """Count a second pass, in which nothing is done the first time."""
    device = torch.device("cuda", 0)
    with fake_cuda(DEVICES["h100"].properties()), FakeCudaMode() as mode, DeviceCounts(mode, 1, {}) as counted:
        hidden_TD = torch.empty(T, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        weight_VD = torch.empty(V, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        teacher_VE = torch.empty(V, E, dtype=torch.bfloat16, device=device)
        signal = FullVocab(torch.empty(T, E, dtype=torch.bfloat16, device=device), OutputHead(teacher_VE))
        terms = {
            "forward_kl": [Distill(signal, forward_kl())],
            "jsd(0.5)": [Distill(signal, jsd(0.5))],
            LOSSES[2]: [
                CrossEntropy(torch.empty(T, dtype=torch.int64, device=device), scale=0.3),
                Distill(signal, jsd(0.5), scale=0.7),
            ],
        }[loss]
        for _ in range(2):
            counted.restart()
            linear_objective(hidden_TD, OutputHead(weight_VD), terms).loss.backward()
    counts = counted.counts
    floor = 2 * T * V * (3 * width + E) / PRODUCTS
    products = sum(counts.products.values()) / PRODUCTS
    others = counts.traffic / COPIES
    return {
        "times_floor": round((products + others) / floor, 3),
        "floor_ms": round(1e3 * floor, 2),
        "products_ms": round(1e3 * products, 2),
        "other_kernels_ms": round(1e3 * others, 2),
        "bytes_per_element": round(counts.traffic / (T * V), 2),
        "launches": sum(counts.kernels.values()),
    }


if __name__ == "__main__":
    main()
