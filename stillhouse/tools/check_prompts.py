"""The rows of `stillhouse check` about an on-policy run: its prompts, and the completions of its first step."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from stillhouse.display import escaped
from stillhouse.generation import PromptPlan, Sample
from stillhouse.generation.advantages import mean_and_deviation
from stillhouse.loops.prompt_evaluation import held_out_prompts, shared_prompts
from stillhouse.loops.rollout_records import sample_record
from stillhouse.loops.sample_statistics import equal_rewards
from stillhouse.loops.session_objects import Session
from stillhouse.output.report.shown_completions import facts_of

#: the number of characters that are shown of a prompt, from its end, and of a completion
_PROMPT, _COMPLETION = 200, 600


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
    if session.eval_config.prompts is not None:
        warning = shared_prompts(session, held_out_prompts(session, session.eval_config.prompts))
        yield from () if warning is None else (("warning", warning),)


def sample_rows(session: Session, plan: PromptPlan, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of the rows about the first completion of a step, and about the step's rewards."""
    if not samples:
        return
    record = sample_record(session, 0, samples[0])
    facts = [session.train.documents.sources[samples[0].prompt], *facts_of(record)]
    prompt = record.prompt if len(record.prompt) <= _PROMPT else f"…{record.prompt[-_PROMPT:]}"
    yield (
        "completion",
        f"{', '.join(facts)}; the generated tokens are in ⟦ ⟧:\n{prompt}{_completion(session, samples[0])}",
    )
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return
    mean, deviation = mean_and_deviation(rewards)
    values = f"from {min(rewards):.4g} to {max(rewards):.4g}, mean {mean:.4g}, standard deviation {deviation:.4g}"
    share = equal_rewards(samples, plan)["equal_rewards"]
    words = (
        f"; {share:.0%} of the prompts have equal rewards, which are no signal for policy_gradient" if share else ""
    )
    yield "rewards", f"of {len(rewards):,} completions: {values}{words}"


def _completion(session: Session, sample: Sample) -> str:
    """The completion of a sample, shortened, with what the model has generated in brackets."""
    text, tokens = "", zip(sample.is_generated_N.tolist(), sample.completion.ids_N.tolist(), strict=True)
    for is_generated, stretch in groupby(tokens, key=itemgetter(0)):
        piece = session.tokenizer.decode([token for _, token in stretch])
        text += f"⟦{piece}⟧" if is_generated else piece
    return text if len(text) <= _COMPLETION else f"{text[:_COMPLETION]}…"
