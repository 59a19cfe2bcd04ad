from stillhouse.rollout.turns import Reply, TurnReplies

TEXT = " Please try again. "


class RetryReplies(TurnReplies):
    def request(self, sample):
        return self._calls.request(sample.arguments, self._episode(sample))

    def reply(self, sample, future, most):
        is_right = future.result()
        return None if is_right else Reply(TEXT, self._tokenizer.encode(TEXT, add_special_tokens=False))
