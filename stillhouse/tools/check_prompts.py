"""The rows of `stillhouse check` about the prompts of an on-policy run."""

from collections.abc import Iterator

from stillhouse.display import escaped
from stillhouse.generation import PromptPlan
from stillhouse.loops.session_objects import Session


def prompt_rows(session: Session, plan: PromptPlan) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of the rows about each of several sources, and about the dataset's share."""
    rollout, steps, sources = session.rollouts[0], session.step_schedule.steps, plan.sources
    weights = sum(source.weight for source in sources)
    for settings, source, of_rollout in zip(session.prompt_sources, sources, session.rollouts, strict=False):
        share = source.weight / weights
        generated = steps * plan.prompts_per_step * share * source.share
        words = [
            f"{share:.1%} of the prompts",
            f"{generated:,.0f} with completions of the {rollout.writer}: "
            f"{generated / source.prompts:.2f} passes over {source.prompts:,}",
            f"temperature {of_rollout.temperature:g}",
            *([] if of_rollout.reward is None else [f"reward {of_rollout.reward}"]),
            *([] if of_rollout.environment is None else [f"environment {of_rollout.environment}"]),
        ]
        yield (f"  {settings.shown_name} ", escaped(", ".join(words)))
    has_both = all(plan.prompts_per_step * min(source.share, 1 - source.share) >= 1 - 1e-6 for source in sources)
    dataset = sum(source.dataset for source in sources)
    if dataset and len(sources) == 1 and not has_both:
        yield (
            "warning",
            f"prompts of a step: {plan.prompts_per_step}; all completions of a prompt have one origin, so "
            "not every step has both origins; raise rollout.prompts_per_step or train.tokens_per_step",
        )
    if dataset:
        completions = sum(len(plan.from_dataset(step)) for step in range(steps))
        of_it = f"the dataset's, which has {dataset:,}: {completions / dataset:.2f} passes over it"
        yield ("dataset", f"{completions:,} of the completions are {of_it}")
