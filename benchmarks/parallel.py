"""The costs of layouts: sent bytes and held bytes compared with their formulas, and the pipeline's idle share.

    python -m benchmarks.parallel

A small student and teacher of Qwen3's architecture take a few steps under one layout after another, in eight gloo
processes. The bytes that the processes send and hold (benchmarks/parallel_ranks.py) are compared with the formulas of
benchmarks/parallel_costs.py. The idle share is simulated with the orders of torch's schedules
(benchmarks/pipeline_idle.py); the benchmark checks first that the schedules that ran here had the same orders.

Writes benchmarks/results/parallel-<date>.json. docs/scaling.md draws the conclusions for large models.
"""

from typing import Any

import torch

from benchmarks.objective_scaling import on_ranks
from benchmarks.parallel_costs import between_steps, traffic, within_step
from benchmarks.parallel_ranks import CHUNK, LOSS, ROWS, STUDENT, TEACHER, TOKENS, VOCABULARY, Case, run_cases
from benchmarks.pipeline_idle import SCHEDULES, Move, in_flight, line, rows, trace
from benchmarks.record import result_file, write_result
from stillhouse.parallel import SCHEMES, Degrees, Layout

RANKS = 8
#: no compiler, because compiling would take most of the time
ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}


def main() -> None:
    layouts = measured()
    idle = []
    for row in rows((2, 4, 8), (1, 2, 4), (0, 1, 4)):
        print(line(row), flush=True)
        idle.append(row)
    sizes = {"student": STUDENT, "teacher": TEACHER, "vocabulary": VOCABULARY, "rows": ROWS, "tokens": TOKENS}
    sizes |= {"chunk_tokens": CHUNK, "loss": LOSS}
    write_result(result_file("parallel"), {"theme": "parallel", "sizes": sizes, "layouts": layouts, "idle": idle})


def cases() -> list[Case]:
    degrees = [Degrees(), Degrees(fsdp=2), Degrees(fsdp=4), Degrees(replicate=2), Degrees(tensor=2)]
    degrees += [Degrees(context=2), Degrees(pipeline=2), Degrees(pipeline=4), Degrees(pipeline=2, fsdp=2, tensor=2)]
    cases = [Case(Layout(degree)) for degree in degrees]
    cases += [Case(Layout(), recomputed=True), Case(Layout(Degrees(fsdp=2)), bf16=True)]
    cases += [Case(Layout(Degrees(fsdp=2), gather_dtype=torch.bfloat16), bf16=True)]
    cases += [Case(Layout(Degrees(pipeline=2, tensor=2)), bf16=True)]
    return cases + [Case(Layout(Degrees(pipeline=4), name)) for name in SCHEDULES if name != "1f1b"]


def measured() -> list[dict[str, Any]]:
    by_rank = on_ranks(run_cases, RANKS, (cases(),), 1, ENVIRONMENT)
    rows = []
    for case in cases():
        row = compared(case, [results[str(case)] for results in by_rank if str(case) in results])
        show(row)
        rows.append(row)
    return rows


def compared(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return [measured, formula] in bytes: sent by the rank that sends most, and held by each pipeline rank."""
    formulas = [traffic(case.job, rank["pipeline_rank"]) for rank in ranks]
    busiest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank]["sent"].values()))
    row: dict[str, Any] = {
        "layout": str(case),
        "micro_batches": case.micro_batches,
        "sent": both(ranks[busiest]["sent"], formulas[busiest]),
        "every_rank_sends_by_formula": all(
            rank["sent"] == formula for rank, formula in zip(ranks, formulas, strict=True)
        ),
        "largest_allocation": max(rank["largest_allocation"] for rank in ranks),
        "logits_of_a_micro_batch": 4 * ROWS * TOKENS * VOCABULARY,
    }
    layout = case.layout
    if layout.degrees.pipeline == len(ranks) > 1:
        orders = trace(layout.schedule, len(ranks), case.micro_batches)
        row["order_is_the_traces"] = all(
            [Move(*values) for values in rank["order"]] == order for rank, order in zip(ranks, orders, strict=True)
        )
    if SCHEMES[layout.schedule].per_rank == 1 and not case.bf16:
        row["held"] = [held(case, place, ranks) for place in range(layout.degrees.pipeline)]
    return row


def held(case: Case, place: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the bytes of one rank of the pipeline. The peak is the sum of those between steps and within a step."""
    layout, most_in_flight = case.layout, 1.0
    if layout.stages > 1:
        most_in_flight = in_flight(trace(layout.schedule, layout.degrees.pipeline, case.micro_batches)[place])
    memories = [rank for rank in ranks if rank["pipeline_rank"] == place]
    stays, comes = between_steps(case.job, place), within_step(case.job, place, int(most_in_flight))
    bytes_held = [max(memory[name] for memory in memories) for name in ("between_steps", "within_step")]
    return {
        "pipeline_rank": place,
        "in_flight": most_in_flight,
        "between_steps": [bytes_held[0], stays.total()],
        "within_step": [bytes_held[1], comes.total()],
        "peak": [sum(bytes_held), stays.total() + comes.total()],
        "formula": stays | comes,
    }


def both(measured: dict[str, int], formula: dict[str, int]) -> dict[str, list[int]]:
    names = sorted(measured.keys() | formula.keys())
    return {name: [measured.get(name, 0), formula.get(name, 0)] for name in names}


def show(row: dict[str, Any]) -> None:
    print(row["layout"])
    figures = {f"sent: {name}": pair for name, pair in row["sent"].items()}
    for held in row.get("held", ()):
        figures |= {f"{name}, rank {held['pipeline_rank']}": held[name] for name in ("between_steps", "within_step")}
    for name, (measured, formula) in figures.items():
        print(f"    {name:<52}{measured:>12,}{formula:>12,}  {measured / formula if formula else float('inf'):.3f}")
    print("   ", {name: value for name, value in row.items() if isinstance(value, bool | int)}, flush=True)


if __name__ == "__main__":
    main()
