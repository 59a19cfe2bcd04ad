"""The rules between several keys of a configuration, as one table; `check_rules.py` adds the rules of add-ons.

The class of a section defines the valid values of a single key. A rule defines a conflict between several keys.
"""

import os
import re
from itertools import combinations
from pathlib import Path

from stillhouse.config.data_section import is_source_name
from stillhouse.config.evaluation_section import KNOWN, compares_with_teacher, is_of_callback, set_of
from stillhouse.config.reward_sum import has_part_of_object, reward_parts
from stillhouse.config.rule import NAMED, Rule, default, excludes, needs
from stillhouse.config.schema import yaml_value
from stillhouse.config.servers import GROUP
from stillhouse.config.train_section import OFFLOADED
from stillhouse.display import enumerated
from stillhouse.registry import load, load_all, registered

#: the keys of the environments and tools that reply to turns of samples
ENVIRONMENTS = [f"rollout.{name}" for name in registered("stillhouse.environments")]

_ON_HELD_OUT_DOCUMENTS = ("eval/cross_entropy", "eval/forward_kl", "eval/agreement")

RULES: tuple[Rule, ...] = (
    # a teacher in this job
    excludes("teacher.quantize", "teacher.parallel"),
    excludes("teacher.offload", "teacher.quantize", "teacher.cross_tokenizer"),
    excludes(
        "teacher.parallel",
        "teacher.cross_tokenizer",
        because="each process that needs signals then holds the whole teacher",
    ),
    *(
        excludes(f"teacher.parallel.{key}", expected=f"parallel.{key} in its place", because="both models have it")
        for key in ("gather_dtype", "offload")
    ),
    *(excludes(f"teacher.parallel.{key}") for key in ("engine", "sequence")),
    *(
        Rule(
            (f"teacher.{key}", "student", "teacher"),
            lambda value, student, teacher: bool(value) and teacher is not None and teacher.is_base_of(student),
            yaml_value(default(f"teacher.{key}")),
            f"the teacher is the student without its adapter, {why}",
        )
        for key, why in (("cross_tokenizer", "and has the same tokenizer"), ("offload", "and shares its weights"))
    ),
    # several teachers
    excludes("teachers", "teacher", expected="either teacher, or teachers with all teachers by name"),
    Rule(
        (f"{NAMED}prefix", f"{NAMED}student"),
        lambda prefix, student: prefix is None and student == "live",
        "a text",
        "without a prefix, this teacher has the same distributions as the student",
    ),
    excludes("teachers.sum", "teachers.route", because="with a route, every document has only one teacher"),
    excludes(
        f"{NAMED}temperature",
        "teachers.sum=distributions",
        expected="null, and the temperature in objective.temperature",
        because="there is one divergence, from the sum of all distributions",
    ),
    excludes(f"{NAMED}cross_tokenizer", "teachers.sum=distributions", because="the sum needs exact distributions"),
    excludes(f"{NAMED}signal", "teachers.sum=distributions", because="the sum needs the full distributions"),
    # rollouts
    excludes(
        "rollout.engine=transformers",
        "rollout.url",
        expected=enumerated([*registered(GROUP)], "or"),
        because="transformers runs in this process",
    ),
    Rule(
        ("rollout.url", "rollout.engine"),
        lambda url, engine: url is None and engine != "transformers",
        "the address of the server",
    ),
    Rule(
        ("rollout.timeout", "rollout.url", "rollout.reward"),
        lambda timeout, url, reward: (
            timeout != default("rollout.timeout")
            and url is None
            and not any(part.is_server for part in reward_parts(reward))
        ),
        yaml_value(default("rollout.timeout")),
        "it has an effect only with rollout.url or a server in rollout.reward",
        has_no_effect=True,
    ),
    needs("rollout.weights", "rollout.url"),
    needs("rollout.token_variable", "rollout.url"),
    excludes("rollout.weights", "rollout.writer=teacher", because="only the student's weights change"),
    *(
        excludes(second, first, expected="only one of these keys", because="each of them replies to turns")
        for first, second in combinations(ENVIRONMENTS, 2)
    ),
    Rule(
        ("rollout.reward", *ENVIRONMENTS),
        lambda reward, *environments: has_part_of_object(reward) and environments.count(None) == len(environments),
        f"a class with a method reward in {enumerated(ENVIRONMENTS, 'or')}",
        "the part environment of a reward is the result of this method",
    ),
    needs("rollout.max_turns", *ENVIRONMENTS),
    Rule(
        ("rollout.workers", "rollout.reward", *ENVIRONMENTS),
        lambda workers, reward, *environments: (
            bool(workers)
            and environments.count(None) == len(environments)
            and all(part.is_server for part in reward_parts(reward))
        ),
        "0",
        f"it has an effect only with a function in rollout.reward, or with {enumerated(ENVIRONMENTS, 'or')}",
        has_no_effect=True,
    ),
    *(
        excludes(
            f"rollout.{key}",
            "rollout.workers=0",
            expected=f"rollout.workers of at least 1, or no rollout.{key}",
            because="it limits calls in the processes of rollout.workers",
        )
        for key in ("worker_timeout", "worker_memory")
    ),
    needs("rollout.advantage", "rollout.reward"),
    needs("rollout.deviation", "rollout.reward"),
    excludes("rollout.deviation", "rollout.advantage=centered", because="centered divides by no deviation"),
    excludes(
        "rollout.samples_per_prompt=1",
        "rollout.reward",
        expected="at least 2",
        because="an advantage is relative to the other completions of the prompt",
    ),
    *(
        Rule(
            (f"{section}.max_new_tokens", "data.max_tokens"),
            lambda new_tokens, max_tokens: new_tokens > max_tokens - 2,
            "at most data.max_tokens - 2, or a larger data.max_tokens",
            "a prompt needs room for two tokens",
        )
        for section in ("rollout", "eval.prompts")
    ),
    excludes("rollout.discount", "parallel.context", because="context parallelism divides each completion"),
    Rule(
        ("objective.loss", "parallel.context"),
        lambda loss, context: bool(re.search(r"\bratio\s*=\s*sequence\b", loss)) and (context or 1) > 1,
        "ratio=token, or parallel.context=1",
        "context parallelism divides each completion",
    ),
    excludes("objective.tokens", "rollout", because="a run with rollout trains only on completions"),
    excludes("teacher.cross_tokenizer", "rollout"),
    # an objective for each origin
    Rule(
        ("objective.by_origin", "rollout"),
        lambda by_origin, rollout: by_origin is not None and rollout is None,
        "null, and the objective in objective.loss",
        "without rollout, all documents are from the dataset",
    ),
    excludes("objective.loss", "objective.by_origin", because="the objectives of the origins replace it"),
    excludes("objective.by_origin", "teachers", because="metrics have the name of an origin or of a teacher"),
    *(
        Rule(
            ("objective.by_origin.dataset", "rollout.share"),
            lambda loss, share, is_given=is_given: (
                share is not None and (loss is not None) == is_given and (share == 1) == is_given
            ),
            "an objective with rollout.share below 1, and null with rollout.share=1",
            "a step has completions of the dataset only with a share below 1",
            has_no_effect=is_given,
        )
        for is_given in (True, False)
    ),
    *(
        Rule(
            (f"objective.by_origin.{origin}", "rollout.writer"),
            lambda loss, writer, origin=origin: writer is not None and (loss is None) != (writer != origin),
            f"an objective with rollout.writer={origin}, and null with another writer",
            "only the model of rollout.writer generates completions",
        )
        for origin in ("student", "teacher")
    ),
    Rule(
        ("data.train", "rollout"),
        lambda sources, rollout: (
            isinstance(sources, list)
            and rollout is None
            and any(source.name is not None or source.rollout is not None for source in sources)
        ),
        "sources without name and rollout, or the section rollout",
        "these keys are for prompts",
    ),
    Rule(
        ("data.train", "rollout"),
        lambda sources, rollout: (
            isinstance(sources, list)
            and rollout is not None
            and (
                len({source.shown_name for source in sources}) < len(sources)
                or not all(is_source_name(source.shown_name) for source in sources)
            )
        ),
        "a different name for every source (a letter, then letters, digits, _ and -; not reward)",
        "metrics contain this name, which is by default that of the file or folder",
    ),
    # evaluations, and the best checkpoint
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
        "only you know which value of your metric is better",
    ),
    Rule(
        ("checkpoint.best", "data.eval"),
        lambda best, sets: set_of(best) is not None and (not isinstance(sets, dict) or set_of(best) not in sets),
        "a metric of a set that data.eval names",
    ),
    Rule(
        ("checkpoint.best", "eval.tasks"),
        lambda best, tasks: (
            (best or "").startswith("eval/exact_match/")
            and not any(best.endswith(f"/{text.partition('(')[0]}") for text in tasks)
        ),
        "the task of this metric in eval.tasks",
    ),
    Rule(
        ("checkpoint.best", "data.eval", "teacher", "teachers"),
        lambda best, source, *teachers: compares_with_teacher(best) and bool(source) and not any(teachers),
        "eval/cross_entropy, a task or null",
        "there is no teacher",
    ),
    Rule(
        ("eval.samples", "data.eval", "eval.prompts"),
        lambda samples, source, prompts: samples > 0 and source == 0 and prompts is None,
        "eval.samples=0, held-out documents in data.eval, or the section eval.prompts",
        "the samples are completions of held-out documents",
    ),
    Rule(
        ("checkpoint.best", "eval.prompts"),
        lambda best, prompts: (best or "").startswith("eval/prompts/") and prompts is None,
        "a metric of this run, or the section eval.prompts",
    ),
    Rule(
        ("checkpoint.best", "eval.prompts.reward"),
        lambda best, reward: best == "eval/prompts/reward" and reward is None,
        "a metric of this run, or a reward in eval.prompts.reward",
    ),
    Rule(
        ("checkpoint.best", "teacher", "teachers"),
        lambda best, *teachers: best == "eval/prompts/reverse_kl" and not any(teachers),
        "a metric that needs no teacher",
    ),
    # early stopping
    Rule(
        ("eval.patience", "checkpoint.best"),
        lambda patience, best: patience is not None and best is None,
        "null, or a metric in checkpoint.best",
        "this metric decides when training ends",
    ),
    Rule(
        ("eval.patience", "eval.every"),
        lambda patience, every: patience is not None and every == 0,
        "null, or steps between two evaluations in eval.every",
        "without evaluations during training, training cannot end early",
    ),
    Rule(
        ("eval.patience", "data.eval", "checkpoint.best"),
        lambda patience, source, best: patience is not None and source == 0 and best in _ON_HELD_OUT_DOCUMENTS,
        "null, held-out documents in data.eval, or another metric in checkpoint.best",
        "this metric is computed on held-out documents",
    ),
    excludes("eval.prompts", "teacher.cross_tokenizer"),
    Rule(
        ("eval.prompts.reward", "rollout"),
        lambda reward, rollout: has_part_of_object(reward) and rollout is None,
        "functions and servers, or the section rollout with an environment or tools",
        "the part environment of a reward is the result of their method reward",
    ),
    Rule(
        ("data.cache", "out"),
        lambda cache, out: (
            cache not in (None, "auto") and Path(os.path.abspath(cache)).is_relative_to(os.path.abspath(out))
        ),
        "a folder outside of out",
        "out must be empty when a run begins",
    ),
    # the student's first weights
    excludes("student.init", "student.adapter", because="an adapter needs the weights of student.model"),
    excludes("student.init", "student.mtp", because="MTP layers need the trained student of an earlier run"),
    Rule(
        ("student.init.from", "teacher"),
        lambda source, teacher: source == "teacher" and (teacher is None or teacher.model is None),
        "random, or a section teacher with the key model",
    ),
    excludes(
        "student.init.from=teacher",
        "teacher.cross_tokenizer",
        expected="random",
        because="the teacher's embedding is for another vocabulary",
    ),
    # the student's trained parts
    excludes("student.train", "student.adapter", because="only the adapter is trained"),
    Rule(
        ("student.quantize", "student.adapter"),
        lambda kind, adapter: kind is not None and adapter is None,
        "null, or student.adapter",
        "quantized weights cannot be trained",
    ),
    excludes("student.train", "student.mtp"),
    # steps and batches
    Rule(
        ("train.steps", "train.epochs"),
        lambda steps, epochs: steps is not None and epochs is not None,
        "one of the two, and null for the other",
    ),
    Rule(
        ("train.epochs", "train.steps"),
        lambda epochs, steps: epochs is None and steps is None,
        "a number, or train.steps",
    ),
    *(
        Rule(
            (key, "data.max_tokens"),
            lambda tokens, max_tokens: tokens is not None and tokens < max_tokens,
            "at least data.max_tokens, or a smaller data.max_tokens",
            "a packed sequence is never split",
        )
        for key in ("train.micro_batch_tokens", "train.tokens_per_step", "eval.micro_batch_tokens")
    ),
    Rule(
        ("train.optimizer", "parallel.offload"),
        lambda name, offload: bool(offload) and OFFLOADED not in load("stillhouse.optimizers", name).capabilities,
        "adamw",
    ),
    # the dtypes between layers, and compiled layers
    *(
        excludes(
            key,
            "train.precision=fp32",
            expected="null, or train.precision=bf16",
            because="with fp32, layers compute in the dtype of the weights",
        )
        for key in ("parallel.gather_dtype", "train.residual_dtype")
    ),
    excludes(
        "train.compile", "parallel.tensor", "parallel.expert", because="torch cannot compile layers with DTensors"
    ),
    *(
        excludes("train.compile", f"{model}.quantize", because="quantized layers have no plain weights")
        for model in ("student", "teacher")
    ),
    *(
        rule
        for group in ("stillhouse.parts", "stillhouse.environments")
        for kind in load_all(group).values()
        for rule in kind.rules()
    ),
)
