"""`stillhouse plan`: the dry run of a job on devices that are not there."""

import json
from typing import TYPE_CHECKING

import click

from stillhouse.cli.arguments import configured, load, misused
from stillhouse.display import print_escaped

if TYPE_CHECKING:
    from stillhouse.config import RunConfig
    from stillhouse.plan.layout_plan import Machine


@click.command()
@configured
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of the job, one a GPU."
)
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs of a machine.")
@click.option("--device", default="h100", show_default=True, help="rtx4090, a100, h100, h200 or b200.")
@click.option(
    "--document-tokens",
    type=click.IntRange(2),
    default=512,
    show_default=True,
    help="Length of the documents; with rollout, of the prompts.",
)
@click.option("--fit", is_flag=True, help="Search layouts, micro-batches and recomputation; print the five fastest.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    arguments: tuple[str, ...],
    *,
    ranks: int,
    gpus_per_node: int,
    device: str,
    document_tokens: int,
    fit: bool,
    as_json: bool,
    **flags: str | None,
) -> None:
    """Plan a job on GPUs that are not here.

    Runs a step of the first, an inner and the last pipeline stage with tensors that have no values, in processes
    without a GPU. Prints their memory, kernels, messages and waits, and a predicted time. Needs neither data nor
    weights: only the models' config.json. The exit code is 2 if the job does not fit. Of an on-policy run, only the
    training step is planned.

    \b
    stillhouse plan run.yaml --ranks 64
    stillhouse plan run.yaml parallel.tensor=2 --ranks 64 --device h200
    stillhouse plan run.yaml --ranks 64 --fit
    """
    from stillhouse.plan.devices import DEVICES

    if device not in DEVICES:
        raise misused(f"--device: got {device!r}, expected one of {', '.join(DEVICES)}")
    config = load(arguments, flags, needs=())
    from stillhouse.plan.layout_plan import Machine

    machine = Machine(ranks, gpus_per_node, device)
    if fit:
        _print_fits(config, machine, document_tokens, as_json)
    else:
        _print_plan(config, machine, document_tokens, as_json)


def _print_plan(config: "RunConfig", machine: "Machine", document_tokens: int, as_json: bool) -> None:
    """Print a plan. Raises ConfigError if it does not fit, so that the exit code is 2."""
    from stillhouse.config import ConfigError
    from stillhouse.plan.layout_plan import plan
    from stillhouse.plan.table import does_not_fit, lines

    result = plan(config, machine, document_tokens)
    print_escaped(json.dumps(result.as_json(), indent=2) if as_json else "\n".join(lines(result)))
    if not result.fits:
        raise ConfigError(None, does_not_fit(result))


def _print_fits(config: "RunConfig", machine: "Machine", document_tokens: int, as_json: bool) -> None:
    """Print the fastest layouts that fit. Raises ConfigError if none fits."""
    from stillhouse.config import ConfigError
    from stillhouse.plan.fit import fit
    from stillhouse.plan.table import fit_lines

    fits = fit(config, machine, document_tokens)
    if not fits:
        raise ConfigError(
            "parallel",
            f"no layout of {machine.ranks} × {machine.device.title} fits: expected more --ranks, a --device with "
            "more memory, smaller data.max_tokens, or larger train.tokens_per_step for more sequences than ranks",
        )
    if as_json:
        plans = [{"overrides": fit.overrides} | fit.plan.as_json() for fit in fits]
        print_escaped(json.dumps(plans, indent=2))
    else:
        print_escaped("\n".join(fit_lines([(fit.overrides, fit.plan) for fit in fits])))
