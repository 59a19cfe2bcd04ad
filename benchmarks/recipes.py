"""The predicted memory and time of each recipe: runs the lines `# stillhouse plan …` in the files of recipes/.

    python -m benchmarks.recipes            # all recipes whose configuration has changed since their last plan
    python -m benchmarks.recipes --all NAME # these recipes again (without names: all), after a change of the planner

The models' configurations are those of recipes/models.yaml, so nothing is read from the hub. Writes
benchmarks/results/recipes.json and the table of docs/recipes.md. All recipes need about half an hour of two cores.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from ruamel.yaml import YAML
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from stillhouse.cli.arguments import is_override
from stillhouse.config import RunConfig, load_config
from stillhouse.plan.command import two_digits
from stillhouse.plan.devices import DEVICES, GIB

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"
#: the lines of the page between which the table is
BEGIN, END = "<!-- the table is written by `python -m benchmarks.recipes` -->", "<!-- end of the table -->"
_COMMAND = "stillhouse plan "


@dataclass(frozen=True)
class PlannedRecipe:
    """A line `stillhouse plan` of a recipe. arguments: those after the file: options and overrides."""

    name: str
    arguments: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join((self.name, *self.arguments))

    @property
    def config(self) -> RunConfig:
        overrides = [argument for argument in self.arguments if is_override(argument)]
        return load_config(RECIPES / f"{self.name}.yaml", overrides)

    @property
    def models(self) -> dict[str, str]:
        """The names of the models by the dotted keys of their sections."""
        config = self.config
        teachers = {section: teacher.model for section, teacher in config.teacher_sections.items() if teacher.model}
        return {"student": config.student.model} | teachers

    @property
    def digest(self) -> str:
        """The hash of all that the plan reads: the keys of the file, the arguments and the models."""
        content = YAML(typ="safe").load((RECIPES / f"{self.name}.yaml").read_text())
        sizes = {name: model_sizes()[name] for name in self.models.values()}
        read = [content, self.arguments, sizes]
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()

    def plan(self, folder: Path) -> dict[str, Any]:
        """Run the line and return what it prints as JSON. folder: has the models' configurations."""
        models = [f"{section}.model={folder / name}" for section, name in self.models.items()]
        line = [sys.executable, "-m", "stillhouse", "plan", str(RECIPES / f"{self.name}.yaml"), *self.arguments]
        done = subprocess.run([*line, *models, "--json"], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 2) or not done.stdout:
            raise RuntimeError(f"{self.key} ended with {done.returncode}:\n{done.stderr}")
        plan: dict[str, Any] = json.loads(done.stdout)
        return plan


def recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if path.name != "models.yaml")


def commands(name: str) -> list[list[str]]:
    """Return the commands in the comments of a recipe; one that ends with a backslash continues on the next line."""
    lines = [line[2:] for line in (RECIPES / f"{name}.yaml").read_text().splitlines() if line.startswith("# ")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in joined if f"recipes/{name}.yaml" in line]


def planned_recipes(names: Sequence[str] = ()) -> Iterator[PlannedRecipe]:
    for name in names or recipes():
        for command in commands(name):
            if command[:2] == ["stillhouse", "plan"]:
                yield PlannedRecipe(name, tuple(command[3:]))


@cache
def model_sizes() -> dict[str, dict[str, Any]]:
    """Return what recipes/models.yaml says of each model, as transformers names it."""
    sizes: dict[str, dict[str, Any]] = YAML(typ="safe").load((RECIPES / "models.yaml").read_text())
    models = {name: dict(options) for name, options in sizes.items()}
    for options in models.values():
        if (attention := options.pop("full_attention_layers", None)) is not None:
            layers = range(options["num_hidden_layers"])
            options["layer_types"] = [f"{'full' if layer in attention else 'linear'}_attention" for layer in layers]
    return models


def model_config(name: str) -> PreTrainedConfig:
    options = dict(model_sizes()[name])
    model_type = options.pop("model_type")
    config = AutoConfig.for_model(model_type, **options)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config.architectures = [classes[model_type]]
    return config


def write_models(folder: Path) -> None:
    """Write the config.json of every model."""
    for name in model_sizes():
        model_config(name).save_pretrained(folder / name)


def plans() -> dict[str, dict[str, Any]]:
    """Return the results so far, by the keys of the recipes."""
    if not RESULTS.exists():
        return {}
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["plans"]
    return results


def figures(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table shows of a plan, and the memory of the largest rank by purpose, in bytes."""
    rank = max(plan["counts"].values(), key=lambda rank: sum(rank["peak"].values()))
    return {
        "device": plan["device"],
        "ranks": plan["ranks"],
        "fits": plan["fits"],
        "peak_bytes": sum(rank["peak"].values()),
        "peak_bytes_by_purpose": rank["peak"],
        "step_tokens": rank["tokens"],
        "step_seconds": plan["step_seconds"],
        "tokens_per_second": plan["tokens_per_second"],
        "model_share_of_peak": plan["model_share_of_peak"],
        "bound": plan["times"][plan["slowest"]]["bound"],
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the page: a row for each planned line."""
    columns = ("recipe", "planned on", "memory of a GPU", "tokens/s", "bound by")
    lines = [columns, ("---",) * len(columns)]
    for recipe in planned_recipes():
        link = f"[{recipe.name}](../recipes/{recipe.name}.yaml)"
        if (result := results.get(recipe.key)) is None:
            lines.append((link, "not planned yet", "", "", ""))
            continue
        lines.append(
            (
                link,
                f"{result['ranks']} × {DEVICES[result['device']].title}",
                f"{result['peak_bytes'] / GIB:.1f} GiB",
                two_digits(result["tokens_per_second"]),
                result["bound"],
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="plan unchanged recipes, too")
    parser.add_argument("names", nargs="*", help="recipes; none: all")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for recipe in planned_recipes(arguments.names):
            if not arguments.all and plans().get(recipe.key, {}).get("sha256") == recipe.digest:
                continue
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            made = {"date": datetime.now(UTC).date().isoformat(), "sha256": recipe.digest, **versions}
            result = made | figures(recipe.plan(Path(folder)))
            print(recipe.key, f"{result['peak_bytes'] / GIB:.1f} GiB", flush=True)
            results = plans() | {recipe.key: result}
            present = {planned.key: results[planned.key] for planned in planned_recipes() if planned.key in results}
            RESULTS.write_text(json.dumps({"plans": present}, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), plans()))


if __name__ == "__main__":
    main()
