"""The commands about finished models: `stillhouse chat`, `evaluate` and `generate`."""

import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from stillhouse.cli.arguments import is_override, misused, quiet_libraries
from stillhouse.cli.hub import require_on_hub, settle_offline
from stillhouse.display import print_escaped
from stillhouse.registry import registered

_FILE = click.Path(dir_okay=False, path_type=Path)


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"got {value}, expected a finite number", context, parameter)
    return value


_temperature = click.option(
    "--temperature",
    type=click.FloatRange(0),
    callback=_finite,
    default=0.0,
    show_default=True,
    help="0: the likeliest tokens.",
)


def model_keys(name: str) -> dict[str, Any]:
    """Return the keys of a model's section for a folder, a hub id, or a run, whose final model is used.

    Raises ValueError for another name, and for a run that has no final model yet.
    """
    from stillhouse.config import load_config
    from stillhouse.config.model_folder import CONFIG, require_model

    folder = Path(name)
    if not (folder / "config.yaml").is_file() or (folder / CONFIG).exists():
        require_model(name)
        return {"model": name}
    if not (folder / "model").is_dir():
        raise ValueError(
            f"{name} is a run that has not ended, so it has no final model: write the model of its last checkpoint "
            f"with `stillhouse export {name} --out FOLDER`, and give that folder"
        )
    student = load_config(folder / "config.yaml").student
    return {"model": str(folder / "model"), "trust_remote_code": student.trust_remote_code}


def _prepare_libraries(models: dict[str, str]) -> None:
    """Find the models on the hub, and hide messages of libraries. models: names of models, by option."""
    settle_offline(models.values())
    require_on_hub({option: (name, None) for option, name in models.items()})
    quiet_libraries()


@click.command()
@click.argument("model", metavar="RUN|MODEL")
@click.option("--against", metavar="teacher|MODEL", help="A second model that gets the same questions. teacher: the "
              "teacher of the run.")  # fmt: skip
@click.option("--system", metavar="TEXT", help="A system message at the beginning of the conversation.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=512, show_default=True, help="Most tokens of an answer."
)
@_temperature
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of sampled answers.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, mps, cuda or cuda:N.")
def chat(
    model: str,
    *,
    against: str | None,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
) -> None:
    """Talk to a model in the terminal.

    The whole conversation is kept until /reset. /quit or Ctrl-D ends the command. Without a terminal, every line of
    the standard input is a question, and also continues the conversation until a line /reset. A model whose tokenizer
    has no chat template continues the text.

    \b
    stillhouse chat runs/a
    stillhouse chat runs/a --against teacher
    echo "What is distillation?" | stillhouse chat Qwen/Qwen3-0.6B
    """
    sections = {model: model_keys(model)}
    if against is not None:
        keys = _teacher_keys(model) if against == "teacher" else model_keys(against)
        sections["teacher" if against == "teacher" else against] = keys
    if against == model:
        raise misused(f"--against: got {against}, the same model: expected another one")
    _prepare_libraries({name: keys["model"] for name, keys in sections.items()})
    from stillhouse.config import TeacherConfig
    from stillhouse.data import load_tokenizer
    from stillhouse.gguf.plain_folder import plain_folder
    from stillhouse.rollout import Sampling
    from stillhouse.tools.chat import Speaker, converse
    from stillhouse.tools.generate_data import load_generator

    speakers = []
    for name, keys in sections.items():
        section = TeacherConfig(**keys | {"model": plain_folder(keys["model"])})
        tokenizer = load_tokenizer(str(section.model), section.revision, section.trust_remote_code)
        generator = load_generator(section, tokenizer, device, Sampling(max_new_tokens, temperature))
        speakers.append(Speaker(name, generator, tokenizer, system, seed))
    converse(speakers, is_terminal=sys.stdin.isatty())


def _teacher_keys(run: str) -> dict[str, Any]:
    """Return the keys of the teacher of a run that decide which model is loaded."""
    from stillhouse.config import load_config

    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--against teacher: {run} is not a run, which would name its teacher: expected a model")
    teacher = load_config(path).teacher
    if teacher is None or teacher.model is None:
        raise ValueError(f"--against teacher: {path} has no teacher.model: expected the folder or hub id of a model")
    return teacher.model_dump(include={"model", "revision", "trust_remote_code", "attention", "dtype", "quantize"})


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="RUN|MODEL... [KEY=VALUE]...")
@click.option("--data", metavar="SOURCE", help="Held-out documents, in the forms of data.eval.")
@click.option("--teacher", metavar="RUN|MODEL", help="A teacher with the same tokenizer, for the divergences.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="Reward of greedy completions of the prompts in --data.")
@click.option("--tasks", metavar="A,B", help="In place of --data: tasks of lm-evaluation-harness.")
@click.option("--task-folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="With --tasks: "
              "folder with definitions of more tasks (YAML).")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="With --tasks: use only this number of examples per task.")
@click.option("--few-shot", type=click.IntRange(0), metavar="N", help="With --tasks: examples in a prompt. "
              "[default: as the task defines]")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), help="With --tasks: examples per forward pass. [default: 8]")
@click.option("--dtype", help="With --tasks: dtype of the weights. [default: the saved dtype]")
@click.option("--device", help="cpu, cuda or cuda:N. [default: auto; with --tasks, cpu]")
@click.option("--out", type=_FILE, help="New JSON file for the results.")
def evaluate(
    arguments: tuple[str, ...],
    *,
    data: str | None,
    teacher: str | None,
    reward: str | None,
    tasks: str | None,
    device: str | None,
    out: Path | None,
    **options: Any,
) -> None:
    """Evaluate models on held-out documents, or on tasks.

    Prints cross-entropy and perplexity per token to predict; with --teacher, also the forward and the reverse KL and
    the share of tokens at which model and teacher agree; with --reward, the mean reward. A run with the same
    configuration logs the same figures. Overrides set keys of this configuration, such as data.max_tokens=4096.

    \b
    stillhouse evaluate runs/a runs/b --data held_out.jsonl --teacher Qwen/Qwen3-8B
    stillhouse evaluate runs/a --data held_out.jsonl --reward mypkg.rewards:exact --out results.json
    stillhouse evaluate runs/a --tasks hellaswag,arc_easy --device cuda
    """
    overrides = [argument for argument in arguments if is_override(argument)]
    names = [argument for argument in arguments if not is_override(argument)]
    if (data is None) == (tasks is None):
        raise misused("expected either --data with held-out documents, or --tasks")
    if not names or len(set(names)) < len(names):
        raise misused(f"got the models {', '.join(names) or 'none'}: expected one or more, each once")
    if out is not None and out.exists():
        raise ValueError(f"{out} exists: expected the name of a new file")
    if tasks is not None:
        if len(names) > 1 or overrides or teacher or reward:
            raise misused("--tasks: expected one model, and neither overrides, --teacher nor --reward")
        _run_harness(names[0], tasks, device or "cpu", out, **options)
        return
    if alien := [name for name, value in options.items() if value is not None]:
        raise misused(f"--{alien[0].replace('_', '-')} has an effect only with --tasks")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("stillhouse evaluate runs in one process: expected no torchrun")
    _evaluate_on_data(names, overrides, str(data), teacher, reward, device, out)


def _evaluate_on_data(
    names: Sequence[str],
    overrides: Sequence[str],
    data: str,
    teacher: str | None,
    reward: str | None,
    device: str | None,
    out: Path | None,
) -> None:
    from stillhouse.config import load_config
    from stillhouse.run.local_checks import Need, check_local

    needs: tuple[Need, ...] = ("data",)
    shared: dict[str, Any] = {"data": {"train": data, "eval": data}, "out": "evaluation"}
    shared |= {"objective": {"loss": "cross_entropy"}} if teacher is None else {"teacher": model_keys(teacher)}
    shared |= {} if reward is None else {"eval": {"prompts": {"data": data, "reward": reward}}}
    shared |= {} if device is None else {"device": device}
    configs = {name: load_config(None, overrides, settings={"student": model_keys(name), **shared}) for name in names}
    for config in configs.values():
        check_local(config, needs)
    models = {name: config.student.model for name, config in configs.items()}
    _prepare_libraries(models | ({} if teacher is None else {"--teacher": shared["teacher"]["model"]}))
    from stillhouse.run.setup import with_plain_models
    from stillhouse.tools.evaluate import evaluate_model, limits_in_words, require_comparable, table, write_results

    configs = {name: with_plain_models(config) for name, config in configs.items()}
    require_comparable(configs)
    results = {}
    for name, config in configs.items():
        print_escaped(f"evaluating {name} …", err=True)
        results[name] = evaluation = evaluate_model(config)
        if len(results) == 1:
            for line in limits_in_words(evaluation):
                print_escaped(line)
        for line in evaluation.warnings:
            print_escaped(f"warning: {name}: {line}", err=True)
    for line in table(results):
        print_escaped(line)
    if out is not None:
        write_results(out, results)


def _run_harness(
    name: str,
    tasks: str,
    device: str,
    out: Path | None,
    *,
    task_folder: Path | None,
    limit: int | None,
    few_shot: int | None,
    batch_size: int | None,
    dtype: str | None,
) -> None:
    """Evaluate a model with lm-evaluation-harness, which runs it with transformers."""
    if not (task_names := [task for task in tasks.split(",") if task]):
        raise misused("--tasks names no task: expected names with commas between them")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm_eval not installed; pip install 'stillhouse[lm-eval]'")
    model = model_keys(name)["model"]
    _prepare_libraries({"model": model})
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    if unknown := sorted(set(task_names) - set(manager.all_tasks)):
        raise ValueError(f"lm-evaluation-harness has no task {', '.join(unknown)}; see `lm_eval ls tasks`")
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "dtype": dtype or "auto"},
        tasks=task_names,
        num_fewshot=few_shot,
        batch_size=batch_size or 8,
        device=device,
        limit=limit,
        log_samples=False,
        task_manager=manager,
    )["results"]
    if out is not None:
        from stillhouse.output.disk import replace_text

        replace_text(out, json.dumps(results, indent=2) + "\n")
    for task, figures in results.items():
        for key, value in figures.items():
            if isinstance(value, float):
                print_escaped(f"{task:24} {key:28} {value:.4f}")


@click.command()
@click.option("--model", required=True, metavar="RUN|MODEL", help="The model that writes the completions. With "
              "--url, only its tokenizer and configuration are read here.")  # fmt: skip
@click.option("--prompts", required=True, metavar="SOURCE", help="Records with prompts, in the forms of data.train.")
@click.option("--out", required=True, type=_FILE, help="JSONL file for data.train; the same command continues it.")
@click.option("--url", multiple=True, help="A server that has the model. May be given several times.")
@click.option("--engine", metavar="NAME", help="With --url: the kind of the server, as in "
              "rollout.engine. [default: stillhouse]")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(1), default=512, show_default=True, help="Most tokens of a "
              "completion, with its end.")  # fmt: skip
@_temperature
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), callback=_finite, default=1.0, show_default=True,
              help="Sample from the likeliest tokens with this mass.")  # fmt: skip
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="Completions of each prompt.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Each completion has a "
              "seed that this number and its own number determine.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), help="Completions at a time. [default: 16; with --url, 256]")
@click.option("--keep-cut", is_flag=True, help="Keep completions that were cut at --max-new-tokens.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, mps, cuda or cuda:N.")
def generate(
    model: str,
    *,
    out: Path,
    url: tuple[str, ...],
    engine: str | None,
    device: str,
    batch_size: int | None,
    **options: Any,
) -> None:
    """Write a model's completions of prompts as training data.

    This is the data set of sequence-level distillation. A record has messages, or prompt and completion; the model,
    the hash of its weights, the seed and the reason why the completion ended. The same command continues after an
    interruption, and writes the same file as an undisturbed one.

    \b
    stillhouse generate --model Qwen/Qwen3-8B --prompts prompts.jsonl --out answers.jsonl
    stillhouse generate --model Qwen/Qwen3-8B --prompts prompts.jsonl --out answers.jsonl \\
        --url http://127.0.0.1:8000 --engine vllm --temperature 0.7 --samples 4
    """
    from stillhouse.config import TeacherConfig
    from stillhouse.config.servers import GROUP
    from stillhouse.data.read.data_source import require_source

    if engine is not None and not url:
        raise misused(f"--engine: got {engine}, which has an effect only with --url")
    engine = engine or "stillhouse"
    if engine not in registered(GROUP):
        raise misused(f"--engine: got {engine}, expected one of {', '.join(registered(GROUP))}")
    if out.suffix != ".jsonl":
        raise misused(f"--out: got {out}, expected a name that ends with .jsonl")
    if not out.parent.is_dir():
        raise ValueError(f"--out: {out.parent} is not a folder: expected an existing folder for {out.name}")
    require_source(options["prompts"])
    section = model_keys(model)
    _prepare_libraries({"--model": section["model"]})
    from stillhouse.gguf.plain_folder import plain_folder
    from stillhouse.tools.generate_data import GenerationSettings, write_data

    section["model"] = plain_folder(section["model"])
    settings = GenerationSettings(batch_size=batch_size or (256 if url else 16), **options)
    file = write_data(TeacherConfig(**section), settings, out, engine, url, device)
    print_escaped(f"{out}: {file.records:,} records of {file.completions:,} completions")
    if left_out := file.completions - file.records:
        cut = "" if settings.keep_cut else "cut at --max-new-tokens (--keep-cut keeps them), "
        print_escaped(f"left out: {left_out:,} ({cut}empty, or refused by data.train)")
    for error in file.refused[:1]:
        print_escaped(f"warning: data.train refuses {len(file.refused):,} completions, the first: {error}", err=True)
    if file.differing:
        line = f"data.train reads {file.differing:,} of the records as other tokens than the model generated"
        print_escaped(f"warning: {line}", err=True)
