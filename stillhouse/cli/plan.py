"""`stillhouse plan`: the dry run of a job on devices that are not there."""

import json

import click

from stillhouse.cli.arguments import configured, load, misused


@click.command()
@configured
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes of the job, one a GPU."
)
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs of a machine.")
@click.option("--device", default="h100", show_default=True, help="a100, h100, h200 or b200.")
@click.option(
    "--document-tokens", type=click.IntRange(2), default=512, show_default=True, help="Length of the documents."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    arguments: tuple[str, ...],
    *,
    ranks: int,
    gpus_per_node: int,
    device: str,
    document_tokens: int,
    as_json: bool,
    **flags: str | None,
) -> None:
    """Plan a job on GPUs that are not here.

    Runs a step of the first, an inner and the last pipeline stage with tensors that have no values, in processes
    without a GPU. Prints their memory, kernels, messages and waits, and a predicted time. Needs neither data nor
    weights: only the models' config.json. The exit code is 2 if the job does not fit.

    \b
    stillhouse plan run.yaml --ranks 64
    stillhouse plan run.yaml parallel.tensor=2 --ranks 64 --device h200
    """
    from stillhouse.tools.plan.devices import DEVICES

    if device not in DEVICES:
        raise misused(f"--device: got {device!r}, expected one of {', '.join(DEVICES)}")
    config = load(arguments, flags)
    from stillhouse.config import ConfigError
    from stillhouse.tools.plan.layout_plan import Machine
    from stillhouse.tools.plan.layout_plan import plan as planned
    from stillhouse.tools.plan.table import does_not_fit, lines

    result = planned(config, Machine(ranks, gpus_per_node, device), document_tokens)
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=2))
    else:
        for line in lines(result):
            click.echo(line)
    if not result.fits:
        raise ConfigError(None, does_not_fit(result))
