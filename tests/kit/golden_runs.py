"""Six short runs whose losses, gradient norms and final weights are stored in `golden.json`.

    python tests/kit/golden_runs.py            writes the file
    python tests/kit/golden_runs.py --check    compares: bitwise for one process, within 1e-6 for layouts

Bitwise equality holds on the machine and torch version that the file names; elsewhere the tolerance is 1e-5.
"""

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kit.layout_runs import distill
from kit.runs import metrics, save_model, write_run
from safetensors.torch import load_file

from stillhouse.models import Decoder
from stillhouse.objective import Distill, TopK, linear_objective, reverse_kl

FILE = Path(__file__).with_name("golden.json")
LORA: dict[str, Any] = {"student.adapter": {"r": 4, "alpha": 8}, "train.learning_rate": 1e-2}


@dataclass(frozen=True)
class Run:
    processes: int = 1
    family: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "dense": Run(),
    "moe": Run(family="qwen3_moe", settings={"objective.router_aux_loss": 0.01}),
    "lora": Run(settings=LORA),
    "pipeline": Run(2, settings={"parallel": {"pipeline": 2}}),
    "tensor": Run(2, settings={"parallel": {"tensor": 2}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    actual = {"machine": machine(), "runs": all_runs()}
    if not parser.parse_args().check:
        FILE.write_text(json.dumps(actual, indent=1) + "\n", encoding="utf-8")
        return
    differences = compare(json.loads(FILE.read_text(encoding="utf-8")), actual)
    print("\n".join(differences) or "the same")
    sys.exit(bool(differences))


def machine() -> dict[str, str]:
    """Return the processor and the torch version, because the rounding of sums depends on them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else [platform.processor()]
    decisive = sorted({line for line in lines if line.startswith(("vendor_id", "model", "stepping", "flags"))})
    return {"torch": torch.__version__, "cpu": hashlib.sha256("\n".join(decisive).encode()).hexdigest()[:16]}


def all_runs() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        made = {name: recorded(run, Path(folder) / name) for name, run in RUNS.items()}
        return made | {"top_k": top_k_run(Path(folder) / "top_k")}


def recorded(run: Run, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    write_run(folder, family=run.family, **run.settings)
    distill(folder, "out", run.processes)
    lines = metrics(folder / "out")
    return {
        "losses": [line["loss/total_nats_per_token"] for line in lines if "train/gradient_norm" in line],
        "gradient_norms": [line["train/gradient_norm"] for line in lines if "train/gradient_norm" in line],
        "evaluations": [line["eval/forward_kl"] for line in lines if "eval/forward_kl" in line],
    } | weights(load_file(folder / "out" / "model" / "model.safetensors"))


def top_k_run(folder: Path) -> dict[str, Any]:
    """Train four steps on top-8 signals. The command line has no such teacher, so this calls the engine directly."""
    torch.set_num_threads(1)
    student, teacher = (
        Decoder.from_pretrained(save_model(folder / family, family, seed=seed))
        for seed, family in ((1, "llama"), (2, "qwen3"))
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(4):
        ids_BS = torch.randint(0, 50, (2, 37), generator=torch.Generator().manual_seed(step))
        log_probs_TV = teacher(ids_BS).detach().flatten(0, 1).log_softmax(1)
        log_probs_TK, ids_TK = log_probs_TV.topk(8)

        def process(*, hidden_states: Any, head: Any, context: TopK, depth: int = 0) -> Any:
            terms = [Distill(context, reverse_kl())]
            return linear_objective(hidden_states.flatten(0, 1), head, terms, normalizer=74)

        output = student(ids_BS, processor=process, context=TopK(ids_TK, log_probs_TK))
        output.loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)))
        losses.append(float(output.loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "gradient_norms": norms} | weights(student.state_dict())


def weights(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return a hash of the weights, and for each tensor its norm and its product with a fixed random tensor."""
    digest, sizes = hashlib.sha256(), {}
    for name, weight in sorted(state.items()):
        digest.update(name.encode() + weight.numpy().tobytes())
        random = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        sizes[name] = [float(weight.double().norm()), float((weight.double() * random).sum() / random.norm())]
    return {"weights_sha256": digest.hexdigest(), "weights": sizes}


def compare(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return the differences, one line for each."""
    same_machine = expected["machine"] == actual["machine"]
    differences = []
    for name, run in expected["runs"].items():
        here = actual["runs"].get(name, {})
        exact = same_machine and (name not in RUNS or RUNS[name].processes == 1)
        if exact:
            differences += [f"{name}: {key} differs" for key in run if run[key] != here.get(key)]
            continue
        tolerance = 1e-6 if same_machine else 1e-5
        pairs = zip(numbers(run), numbers(here), strict=True)
        apart = [(key, abs(one - other) / max(abs(one), 1e-2)) for (key, one), (_, other) in pairs]
        differences += [f"{name}: {key} differs by {gap:.2g}" for key, gap in apart if not gap <= tolerance]
    return differences


def numbers(value: Any, key: str = "") -> list[tuple[str, float]]:
    """Yield every number of a run's record with its path."""
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in numbers(value[name], f"{key}.{name}")]
    if isinstance(value, list):
        return [number for at, entry in enumerate(value) for number in numbers(entry, f"{key}[{at}]")]
    return [(key, float(value))] if isinstance(value, float) else []


if __name__ == "__main__":
    main()
