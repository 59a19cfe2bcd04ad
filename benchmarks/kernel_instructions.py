"""Compiles the objective's kernels for an H100 or H200, without one, and counts their instructions.

    python -m benchmarks.kernel_instructions      prints, as JSON, for each kernel: instructions per element,
                                                  registers, and bytes of the stack

Every kernel is compiled as the host code launches it: its launch is recorded. The counts come from the disassembly
that Triton's package contains.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stillhouse.objective import forward_kl, jsd
from stillhouse.objective.tile import kernels, triton_kernels
from stillhouse.objective.tile.tile_plan import PointwisePlan

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
C, V = 4, 4096


class Recorded:
    """Takes the place of a kernel and records its launches."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.launches.append((arguments, constants))


def counts(recorded: Recorded) -> dict[str, float]:
    """Compile the last launch and count."""
    arguments, constants = recorded.launches[-1]
    names = recorded.kernel.arg_names
    warps = constants.pop("num_warps")
    signature = dict(zip(names, map(type_name, arguments), strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor) or (isinstance(argument, int) and argument % 16 == 0)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=recorded.kernel, signature=signature, constexprs=values, attrs=aligned)
    binary = triton.compile(source, target=TARGET, options={"num_warps": warps}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        code, usage = (disassembly(option, file.name) for option in ("-sass", "-res-usage"))
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+[^;]+;", code)
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    elements = constants["BLOCK"] / (32 * warps)
    return {"per element": len(instructions) / elements, "registers": registers, "stack": stack}


def disassembly(option: str, path: str) -> str:
    command = [TOOLS / "cuobjdump", option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def type_name(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def main() -> None:
    result, recorded = {}, {}
    for name in ("raw_sums_kernel", "normalized_sums_kernel", "gradient_kernel"):
        recorded[name] = Recorded(getattr(triton_kernels, name))
        setattr(triton_kernels, name, recorded[name])
    tiles_CV = [torch.zeros(C, V), torch.zeros(C, V)]
    rounded_CV = torch.zeros(C, V, dtype=torch.bfloat16)
    for divergence in (forward_kl(), jsd(0.5)):
        pairs = ((divergence, 0, 0),)
        plan = PointwisePlan(tiles=2, temperatures=(1.0,), teachers=((1, 1.0),), pairs=pairs)
        kernels.kernel_piece_sums(plan, tiles_CV)
        result[f"raw_sums of {divergence}"] = counts(recorded["raw_sums_kernel"])
        rows_CX = torch.zeros(C, len(plan.normalizers) + len(plan.coefficients))
        if plan.two_sweep:
            kernels.kernel_normalized_sums(plan, tiles_CV, rows_CX)
            result[f"normalized_sums of {divergence}"] = counts(recorded["normalized_sums_kernel"])
        kernels.kernel_gradient(plan, tiles_CV, rows_CX, rounded_CV)
        result[f"gradient of {divergence}"] = counts(recorded["gradient_kernel"])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
