"""docs/cluster.md and examples/kubernetes.yaml: parsers accept every launch line, and commands print every number."""

import re
import shlex
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.pages import Launch, code_blocks, parse
from kit.runs import ROOT

from benchmarks import cluster, scaling
from stillhouse.config import RunConfig

PAGE = (ROOT / "docs" / "cluster.md").read_text()
SCRIPT = (ROOT / "examples" / "slurm_on_policy.sh").read_text()
RECIPE = ROOT / "recipes" / "qwen3_32b_to_8b_on_policy.yaml"
TEACHER, STUDENT = "Qwen/Qwen3-32B", "Qwen/Qwen3-8B"
GPUS = 8


def lines() -> list[list[str]]:
    """The words of the page's launch lines, without the variables that are set before the program."""
    words = (shlex.split(line) for block in code_blocks(PAGE, "bash") for line in block.splitlines())
    return [list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word) is not None, line)) for line in words]


def documents() -> dict[str, Any]:
    parts = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    return {part["metadata"]["name"]: part for part in parts if part["kind"] != "Service"}


def container(document: Any) -> Any:
    (only,) = document["spec"]["template"]["spec"]["containers"]
    return only


def require_job(config: RunConfig) -> None:
    """The sizes that the page's table explains."""
    assert config.rollout is not None
    assert (config.rollout.schedule, config.rollout.prompts_per_step) == ("async", 256)
    assert config.rollout.prompts_per_step * config.rollout.samples_per_prompt == 1024
    assert config.student.model == STUDENT


def test_the_launch_lines_are_accepted() -> None:
    launches = {program: [line for line in lines() if line[0] == program] for program in ("torchrun", "stillhouse")}
    everything, teacher, trainer = map(parse, launches["torchrun"])
    (writer,) = map(parse, launches["stillhouse"])
    assert (everything.command, everything.nodes, everything.processes) == ("distill", 4, GPUS)
    everything.config(RECIPE)
    assert (teacher.command, teacher.options["teacher"], teacher.processes) == ("serve", TEACHER, 2)
    assert (writer.command, writer.options["teacher"], writer.options["generate"]) == ("serve", STUDENT, True)
    assert (trainer.nodes, trainer.processes) == (2, GPUS)
    assert trainer.options["arguments"][0] == str(RECIPE.relative_to(ROOT))
    require_job(trainer.config(RECIPE))
    (job,) = (line for line in lines() if line[0] == "sbatch")
    assert Path(ROOT, job[1]).exists()
    require_job(Launch("distill", {"arguments": job[2:]}).config(RECIPE))


def test_options_and_variables_are_those_of_the_script() -> None:
    """The script is tried with stand-ins, so that its options are the ones that `make test-engines` uses."""
    for line in (line for line in lines() if line[:2] == ["vllm", "serve"]):
        options = {word for word in line if word.startswith("--")}
        assert {option for option in options if option not in SCRIPT} == set(), line
    writer = container(documents()["writer"])
    assert {name for word in writer["args"] if (name := word.partition("=")[0]) not in SCRIPT} == {"--model"}
    for variable in re.findall(r"`([A-Z]+_(?:ENGINE|NODES|GPUS))", PAGE):
        assert f"{variable}=${{{variable}:-" in SCRIPT


def test_the_job_for_kubernetes_is_that_of_the_page() -> None:
    job, teacher, writer = (documents()[name] for name in ("stillhouse", "teacher", "writer"))
    trainer = parse([*container(job)["command"], *container(job)["args"]])
    assert trainer.nodes == job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert trainer.processes == container(job)["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    config = trainer.config(RECIPE)
    require_job(config)
    assert config.rollout is not None
    assert config.teacher is not None
    assert config.teacher.model is None  # `stillhouse serve` sends it
    for document, urls in ((teacher, config.teacher.urls), (writer, config.rollout.urls)):
        name, port = document["metadata"]["name"], container(document)["readinessProbe"]["httpGet"]["port"]
        pods = range(document["spec"]["replicas"])
        assert urls == [f"http://{name}-{pod}.{name}:{port}" for pod in pods]
        assert document["spec"]["serviceName"] == name
        assert len(pods) * container(document)["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    served = parse([*container(teacher)["command"], *container(teacher)["args"]])
    assert (served.command, served.options["teacher"]) == ("serve", TEACHER)
    assert served.processes == container(teacher)["resources"]["limits"]["nvidia.com/gpu"]
    assert (served.options["host"], served.options["port"]) == ("0.0.0.0", 8000)
    assert f"--model={STUDENT}" in container(writer)["args"]
    assert config.rollout.weights is not None
    for document in (job, writer):
        mounted = {mount["mountPath"] for mount in container(document)["volumeMounts"]}
        assert any(Path(config.rollout.weights).is_relative_to(path) for path in mounted)
    for document in documents().values():
        volumes = {volume["name"] for volume in document["spec"]["template"]["spec"]["volumes"]}
        assert volumes == {mount["name"] for mount in container(document)["volumeMounts"]}


def test_the_numbers_are_those_that_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    cluster.main()
    table, sizes = capsys.readouterr().out.split("\n\n")
    assert table in PAGE
    trainer, *traffic = sizes.splitlines()[1:]
    assert trainer.endswith(": 24.6 GiB")
    assert "\n".join(f"    {line}" for line in traffic) in PAGE
    scaling.main()
    printed = capsys.readouterr().out
    for number in ("65.5 GB", "16.4 GB", "147,456 bytes", "377,187", "29.1 GB"):
        assert number in printed
        assert number in PAGE
