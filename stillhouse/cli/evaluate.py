"""`stillhouse evaluate`: runs tasks of lm-evaluation-harness on an exported model."""

import importlib.util
import json
from pathlib import Path

import click

from stillhouse.cli.arguments import misused, quiet_libraries
from stillhouse.display import print_escaped

MODEL = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("model", type=MODEL, metavar="MODEL_FOLDER")
@click.option("--tasks", required=True, metavar="A,B", help="Names of tasks of lm-evaluation-harness.")
@click.option("--task-folder", type=MODEL, help="Folder with definitions of further tasks (YAML).")
@click.option("--limit", type=click.IntRange(1), help="Only so many examples of each task.")
@click.option(
    "--few-shot", type=click.IntRange(0), metavar="N", help="Examples in a prompt. [default: the task's own]"
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Examples of a forward pass."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="Of the weights. auto: as they were saved.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A new JSON file for the figures.")
def evaluate(
    model: Path,
    *,
    tasks: str,
    task_folder: Path | None,
    limit: int | None,
    few_shot: int | None,
    batch_size: int,
    device: str,
    dtype: str,
    out: Path | None,
) -> None:
    """Evaluate an exported model with lm-evaluation-harness.

    MODEL_FOLDER is a Hugging Face folder, such as the one that a run has exported. The harness runs it with
    transformers.

    \b
    stillhouse evaluate runs/a/model --tasks hellaswag,arc_easy --device cuda
    """
    names = [name for name in tasks.split(",") if name]
    if not names:
        raise misused("--tasks names no task: expected names with commas between them")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm_eval not installed; pip install 'stillhouse[lm-eval]'")
    if out is not None and out.exists():
        raise ValueError(f"{out} exists: expected the name of a new file")
    quiet_libraries()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise ValueError(f"lm-evaluation-harness has no task {', '.join(unknown)}; see `lm_eval ls tasks`")
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": dtype},
        tasks=names,
        num_fewshot=few_shot,
        batch_size=batch_size,
        device=device,
        limit=limit,
        log_samples=False,
        task_manager=manager,
    )["results"]
    if out is not None:
        from stillhouse.output.disk import replace_text

        replace_text(out, json.dumps(results, indent=2) + "\n")
    for name, figures in results.items():
        for key, value in figures.items():
            if isinstance(value, float):
                print_escaped(f"{name:24} {key:28} {value:.4f}")
