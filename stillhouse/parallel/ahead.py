"""A pipeline whose teacher runs a step ahead of its student, where ranks would wait (the order: `filling.py`).

The student goes by torch's 1F1B, its stages and its messages by torch's PipelineStage. The teacher's hidden states
travel by themselves and wait on the last stage until the student's micro-batch is there, whose head then hears them.

B rows, S tokens per row of a micro-batch; E the teacher's width.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import Schedule1F1B

from stillhouse.parallel.filling import Action, fill
from stillhouse.parallel.twin import Tokens, Work


class Schedule1F1BAhead(Schedule1F1B):
    """torch's 1F1B along an order with other actions in it."""

    order: Sequence[Action] = ()
    teach: Callable[[Action], None]
    backward_group: ProcessGroup

    def follow(self, order: Sequence[Action], teach: Callable[[Action], None], backward_group: ProcessGroup) -> None:
        """The order of the next step. teach: does an action of kind T.

        backward_group: for gradients. In one group with hidden states they would meet: NCCL does what two ranks send
        each other in the order of each, and both would send first.
        """
        self.order, self.teach, self.backward_group = order, teach, backward_group

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        given, named = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(given[0], named[0])
        stage, sending = self._stage, _Sending()
        assert stage.group is not None
        for action in self.order:
            at = action.micro_batch
            if action.kind == "F":
                _wait(_begin(stage.get_fwd_recv_ops(at), stage.group))
                output = stage.forward_one_chunk(at, given[at], named[at], save_forward_output=return_outputs)
                self._maybe_compute_loss(stage, output, target_mbs, at, loss_kwargs)
                sending.add(_begin(stage.get_fwd_send_ops(at), stage.group))
            elif action.kind == "B":
                _wait(_begin(stage.get_bwd_recv_ops(at), self.backward_group))
                stage.backward_one_chunk(at, loss=self._maybe_get_loss(stage, at))
                sending.add(_begin(stage.get_bwd_send_ops(at), self.backward_group))
            else:
                self.teach(action)
        sending.wait()
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(1)


@dataclass
class _Step:
    """What there is of the teacher for a step's micro-batches.

    done: how many each rank's stage has run. arrived: hidden states of the stage before, by micro-batch.
    said: on the last stage, after the teacher's last norm.
    """

    tokens: list[Tokens]
    done: tuple[int, ...]
    arrived: dict[int, Tensor] = field(default_factory=dict)
    said: dict[int, Tensor] = field(default_factory=dict)


class Ahead:
    """This rank's stage of the teacher, and what it has said of the next step when a step is at its end.

    speak: runs it on a micro-batch, given by its number and the hidden states of the stage before; without gradient.
    cost: of a stage of the teacher, in forwards of the student's. group, backward_group: along the pipeline, for the
    teacher's messages and for the student's gradients. Between two steps no message is under way.
    """

    def __init__(
        self,
        speak: Callable[..., Tensor],
        cost: float,
        width: int,
        dtype: torch.dtype,
        group: ProcessGroup,
        backward_group: ProcessGroup,
        device: torch.device,
    ):
        self.speak, self.cost, self.width, self.dtype, self.device = speak, cost, width, dtype, device
        self.ranks, self.rank = group.size(), group.rank()
        self.group, self.backward_group = group, backward_group
        for each in (group, backward_group):
            self._meet(each)
        self.now, self.next = self._fresh(()), self._fresh(())
        self.sending = _Sending()

    def begin(self, works: Sequence[Work], upcoming: Sequence[Work]) -> tuple[Sequence[Action], dict[int, Tensor]]:
        """This rank's order for a step, and where the last stage finds what the teacher says of its micro-batches.

        What was said ahead counts if it was about these very works.
        """
        kept = self.next
        self.now = kept if _same(kept.tokens, works) else self._fresh(works)
        self.next = self._fresh(upcoming)
        order = fill(len(works), len(upcoming), self.cost, self.now.done)
        self.next.done = order.done
        return order.ranks[self.rank], self.now.said

    def teach(self, action: Action) -> None:
        """Run a T."""
        step = self.next if action.step else self.now
        number = action.micro_batch
        received: tuple[Tensor, ...] = ()
        if self.rank:
            waiting = step.arrived.pop(number, None)
            received = (self._receive(step.tokens[number]) if waiting is None else waiting,)
        # the next step's micro-batches count on
        hidden_BSE = self.speak(number + action.step * len(self.now.tokens), *received).contiguous()
        if self.rank + 1 == self.ranks:
            step.said[number] = hidden_BSE
            return
        self.sending.add([(dist.isend(hidden_BSE, group=self.group, group_dst=self.rank + 1), hidden_BSE)])

    def end(self) -> None:
        """Take what the stage before has said and this one has not heard yet, so that nobody waits for it."""
        if self.rank:
            done = self.next.done
            for number in range(done[self.rank], done[self.rank - 1]):
                self.next.arrived[number] = self._receive(self.next.tokens[number])
        self.sending.wait()

    def _fresh(self, works: Sequence[Work]) -> _Step:
        # what nobody asks is as good as said
        asked = any(work.asks_teacher for work in works)
        return _Step([work.tokens for work in works], (0 if asked else len(works),) * self.ranks)

    def _receive(self, tokens: Tokens) -> Tensor:
        hidden_BSE = torch.empty(*tokens.input_ids_BS.shape, self.width, dtype=self.dtype, device=self.device)
        dist.recv(hidden_BSE, group=self.group, group_src=self.rank - 1)
        return hidden_BSE

    def _meet(self, group: ProcessGroup) -> None:
        """NCCL connects a pair at its first message, for which the one that sends waits for the other: in a step, for
        one that may be waiting for it elsewhere.
        """
        token = torch.zeros(1, device=self.device)
        if self.rank:
            dist.recv(token, group=group, group_src=self.rank - 1)
        if self.rank + 1 < self.ranks:
            dist.send(token, group=group, group_dst=self.rank + 1)


class _Sending:
    """Messages under way, with their tensors, which live until they have been sent."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, Tensor]] = []

    def add(self, started: Iterable[tuple[Any, Tensor]]) -> None:
        self.started = [each for each in self.started if not each[0].is_completed()]
        self.started += started

    def wait(self) -> None:
        _wait(self.started)
        self.started = []


def _begin(messages: Iterable[P2POp], group: ProcessGroup) -> list[tuple[Any, Tensor]]:
    """Start messages that were made for a group of the same ranks, in this one."""
    started = []
    for each in messages:
        peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
        started.append((each.op(each.tensor, group=group, **peer), each.tensor))
    return started


def _wait(started: Iterable[tuple[Any, Tensor]]) -> None:
    for message, _ in started:
        message.wait()


def _same(tokens: Sequence[Tokens], works: Sequence[Work]) -> bool:
    return len(tokens) == len(works) and all(one is work.tokens for one, work in zip(tokens, works, strict=True))


def as_learner(work: Work, *, is_last: bool) -> Work:
    """Of a micro-batch whose teacher runs by itself, what is left for a stage's student: only its head hears."""
    return work if is_last else replace(work, asks_teacher=False)
