"""rollout.retry: a function that says whether a completion is right; if not, the student gets another turn."""

from pydantic import Field

from stillhouse.user_code.environment import Environment
from stillhouse.user_code.functions import copied_record, load_function


class Retry(Environment):
    key = "rollout.retry"
    field = str | None, Field(default=None, description="Whether a completion is right, as package.module:function.")

    def __init__(self, rollout, full_key):
        self.path, self.format_key = rollout.retry, full_key("retry")

    @property
    def functions(self):
        from stillhouse.config import as_config_error

        with as_config_error(self.format_key):
            return [load_function(self.key, self.path)]

    @classmethod
    def answer(cls, path, *, is_limited):
        is_right = load_function(cls.key, path)
        return lambda prompt, completion, record, source: is_right(prompt, completion, copied_record(record, source))

    def replies(self, calls, tokenizer, processor, warn):
        from retry_replies import RetryReplies

        from stillhouse.rollout.turns import EpisodeCalls

        return RetryReplies(EpisodeCalls(calls, self.key, self.path, takes_episodes=False), tokenizer)
