"""The part of `rules.py` about evaluations, and about the best checkpoint by them."""

from stillhouse.config.reward_sum import has_part_of_object
from stillhouse.config.rule import Rule, excludes
from stillhouse.config.sections.checkpoint_section import KNOWN, compares_with_teacher, is_of_callback, set_of

EVALUATION_RULES: tuple[Rule, ...] = (
    Rule(
        ("checkpoint.greater_is_better", "checkpoint.best"),
        lambda greater, best: greater is not None and not is_of_callback(best),
        "null",
        "it is known which value of this metric is better",
    ),
    Rule(
        ("checkpoint.best", "eval.callbacks"),
        lambda best, callbacks: is_of_callback(best) and not callbacks,
        f"{', '.join(KNOWN)}, eval/<set>/… of a set in data.eval, or a metric of eval.callbacks",
    ),
    Rule(
        ("checkpoint.greater_is_better", "checkpoint.best", "eval.callbacks"),
        lambda greater, best, callbacks: greater is None and is_of_callback(best) and bool(callbacks),
        "true or false",
        "the metric is one of yours",
    ),
    Rule(
        ("checkpoint.best", "data.eval"),
        lambda best, sets: set_of(best) is not None and (not isinstance(sets, dict) or set_of(best) not in sets),
        "a metric of a set with a name in data.eval",
    ),
    Rule(
        ("checkpoint.best", "eval.tasks"),
        lambda best, tasks: (
            (best or "").startswith("eval/exact_match/")
            and not any(best.endswith(f"/{text.partition('(')[0]}") for text in tasks)
        ),
        "its task in eval.tasks",
    ),
    Rule(
        ("checkpoint.best", "data.eval", "teacher", "teachers"),
        lambda best, source, *teachers: compares_with_teacher(best) and bool(source) and not any(teachers),
        "eval/cross_entropy, a task or null",
        "there is no teacher",
    ),
    Rule(
        ("checkpoint.best", "data.eval", "teacher.cross_tokenizer"),
        lambda best, source, method: compares_with_teacher(best) and bool(source) and method == "uld",
        "eval/cross_entropy, a task or null",
    ),
    Rule(
        ("eval.samples", "data.eval", "eval.prompts"),
        lambda samples, source, prompts: samples > 0 and source == 0 and prompts is None,
        "held-out data to take prompts from, or the section eval.prompts",
    ),
    Rule(
        ("checkpoint.best", "eval.prompts"),
        lambda best, prompts: (best or "").startswith("eval/prompts/") and prompts is None,
        "a metric of this run, or the section eval.prompts",
    ),
    Rule(
        ("checkpoint.best", "eval.prompts.reward"),
        lambda best, reward: best == "eval/prompts/reward" and reward is None,
        "a metric of this run, or a function as eval.prompts.reward",
    ),
    Rule(
        ("checkpoint.best", "teacher", "teachers"),
        lambda best, *teachers: best == "eval/prompts/reverse_kl" and not any(teachers),
        "a metric of this run, which has no teacher",
    ),
    Rule(
        ("eval.prompts.max_new_tokens", "data.max_tokens"),
        lambda new_tokens, max_tokens: new_tokens > max_tokens - 2,
        "at most data.max_tokens - 2, or a larger data.max_tokens",
        "more leaves no room for a prompt of two tokens",
    ),
    excludes("eval.prompts", "teacher.cache", because="it has no signals of completions that the run writes"),
    excludes("eval.prompts", "teacher.cross_tokenizer"),
    Rule(
        ("eval.prompts.reward", "rollout"),
        lambda reward, rollout: has_part_of_object(reward) and rollout is None,
        "functions and servers, or the section rollout with an environment or tools",
        "environment stands for the reward that their object gives",
    ),
)
