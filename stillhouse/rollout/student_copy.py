"""A full copy of a sharded student on each rank, for generation.

transformers' `generate` needs a full model, but a rank has only a shard of the student. So each rank also keeps a
full copy in the student's dtype on its device, which needs enough memory for both.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from stillhouse.models import Decoder, ProofError, prove_decoder
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.sharded_loading import allocate


class StudentCopy:
    """The full copy. All ranks of the student's mesh must create it together.

    build: returns the full student as `ModelSource.build` does, with arbitrary weights or on the meta device.

    Raises ValueError if no rank has a tensor of the copy, and ProofError if the copy's results are wrong.
    """

    def __init__(self, student: DistributedStudent, build: Callable[[], Decoder]):
        self._student, self.mesh = student, student.mesh
        self.decoder = build()
        if next(self.decoder.parameters()).is_meta:
            allocate(self.decoder, self.mesh.device)
        self.decoder.to(self.mesh.device).eval()
        trained = {
            name
            for part in student.decoders
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self._owners = self._find_owners()
        trained_of_ranks = self.mesh.ranks.gather(sorted(trained))
        self._trained = {name for names in trained_of_ranks for name in names}
        self.decoder.requires_grad_(False)
        self._copy(self._owners)
        with self.mesh.ranks.all_raise(ProofError):
            prove_decoder(self.decoder)

    def refresh(self) -> None:
        """Copy the student's trained weights, one tensor at a time; all ranks must call this.

        Frozen weights, such as the base weights of an adapter, were copied when this object was created.
        """
        self._copy({name: owner for name, owner in self._owners.items() if name in self._trained})

    @torch.no_grad()
    def _copy(self, owners: dict[str, int]) -> None:
        held = self._student.stage_weights()
        here = self.mesh.weights.get_local_rank("pipeline")
        group = self.mesh.weights.get_group("pipeline")
        weights = self.decoder.state_dict()
        for name, owner in owners.items():
            value = held[name].gather().contiguous() if owner == here else torch.empty_like(weights[name])
            if group.size() > 1:
                dist.broadcast(value, group=group, group_src=owner)
            weights[name].copy_(value)

    def _find_owners(self) -> dict[str, int]:
        """For each tensor of the copy, the first coordinate on the pipeline axis whose ranks have it."""
        stage_and_names = self.mesh.weights.get_local_rank("pipeline"), sorted(self._student.stage_weights())
        owners: dict[str, int] = {}
        for coordinate, names in sorted(self.mesh.ranks.gather(stage_and_names)):
            for name in names:
                owners.setdefault(name, coordinate)
        wanted = list(self.decoder.state_dict())
        if missing := [name for name in wanted if name not in owners]:
            raise ValueError(f"no rank holds the student's tensor '{missing[0]}': expected a copy of the same model")
        return {name: owners[name] for name in wanted}
