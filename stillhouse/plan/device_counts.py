"""Counts what operations on fake CUDA tensors would need on a device: kernels, waits, memory, FLOPs and messages."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

#: operations that only describe a tensor's memory in another way, or allocate without writing
_VIEWS = """_reshape_alias _unsafe_view alias as_strided chunk detach detach_ diagonal expand is_pinned lift_fresh
movedim narrow permute record_stream reshape resize_ select set_ slice split split_with_sizes squeeze swapaxes t
transpose unbind unflatten unfold unsqueeze view view_as _version"""
_ALLOCATIONS = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
_WITHOUT_KERNEL = frozenset([*_VIEWS.split(), *_ALLOCATIONS.split()])
#: operations that read a tensor's values on the host, or whose result's size depends on values
_READS = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim"))
_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "mm"))
#: variable-length attention, whose number of floating-point operations depends on the lengths of the documents
_ATTENTION = frozenset(("_varlen_attn", "_varlen_attn_backward"))
_NONE = torch.empty(0)
_PACKAGE = f"{Path(__file__).parents[1]}/"
_COPIES = frozenset(("_to_copy", "copy_"))


@dataclass
class StepCounts:
    """The counts of a step.

    kernels: kernel launches by operation. launches: kernel launches by purpose (`DeviceCounts.labelled`).
    waits: the number of times that the host waits for the device, by place in the code.
    pageable: the number of `non_blocking` copies that wait because the host's memory is not pinned, by place.
    products: floating-point operations of matrix products and attention, by dtype.
    traffic: the bytes that kernels other than products and attention read and write.
    messages, sent: the number of collectives and point-to-point messages by group and operation, and their bytes. The
        bytes of a message are the size of its largest tensor on this rank.
    peak: the bytes in use by each purpose, at the time when their sum is largest.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    traffic: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)


class DeviceCounts(TorchDispatchMode):
    """Counts operations on fake CUDA tensors. Enter it within the `FakeTensorMode` of these tensors.

    document_tokens: the length of a document, from which the operations of attention are computed.
    axes: the axes of the mesh, by the names of their process groups.
    now: the bytes in use on the device, by purpose (see `labelled`).
    """

    def __init__(self, mode: FakeTensorMode, document_tokens: int, axes: Mapping[str, str]):
        super().__init__()
        self._axes = axes
        self._mode, self._labels, self._document_tokens = mode, ["other"], document_tokens
        self._storages: dict[int, tuple[str, int]] = {}
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.now: Counter[str] = Counter()
        self._total = self._largest = 0
        self.counts = StepCounts()

    def restart(self) -> StepCounts:
        """Start new counts and return the earlier counts. The new counts include the memory in use."""
        before, self.counts = self.counts, StepCounts(peak=dict(self.now))
        self._largest = self._total
        return before

    @contextmanager
    def labelled(self, purpose: str) -> Iterator[None]:
        """Count the memory that the block allocates, and the kernels that it launches, under this purpose."""
        self._labels.append(purpose)
        try:
            yield
        finally:
            self._labels.pop()

    def relabel(self, tensor: Tensor, purpose: str) -> None:
        """Count the memory of a tensor under this purpose from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._storages:
            label, size = self._storages[key]
            self._storages[key] = purpose, size
            self.now[label] -= size
            self.now[purpose] += size

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls this mode again with the local tensors
        name, options = operation.overloadpacket.__name__, dict(kwargs or {})
        inputs = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if name == "is_pinned":
            return inputs[0].untyped_storage() in self._pinned
        pin = bool(options.pop("pin_memory", False)) or name == "_pin_memory"
        if name == "_local_scalar_dense" and isinstance(inputs[0], FakeTensor):
            if _is_on_device(inputs[0]):
                self._wait(name)
            # floats are 1, because Adam on the CPU would divide by 0 if its step were 0
            dtype = inputs[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        self._count_wait(name, args, options, inputs)
        if name == "_pin_memory":
            outputs: Any = torch.empty_like(inputs[0])
        elif name == "_grouped_mm":  # fake CUDA tensors support it only in bfloat16
            left, right, *others = args
            outputs = operation(left.to(torch.bfloat16), right.to(torch.bfloat16), *others, **options).to(left.dtype)
        elif name in ("addmm", "mm") and operation._overloadname in ("dtype", "dtype_out"):
            left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            dtype = next(arg for arg in (*args, *options.values()) if isinstance(arg, torch.dtype))
            out: Tensor | None = options.get("out")
            outputs = left.new_empty(left.shape[0], right.shape[1], dtype=dtype) if out is None else out
        else:
            outputs = operation(*args, **options)
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and self._is_counted(leaf)]
        if pin:
            self._pinned.update(result.untyped_storage() for result in results)
        tensors = [*inputs, *results]
        if operation.namespace in ("c10d", "_c10d_functional"):
            self._count_message(name, args, inputs)
        elif operation.namespace != "prim" and name not in _WITHOUT_KERNEL and any(map(_is_on_device, tensors)):
            self._count_kernel(operation, name, args, options, outputs, tensors)
        for result in filter(_is_on_device, results):
            self._hold(result)
        return outputs

    def _is_counted(self, tensor: Tensor) -> bool:
        # tensors of another mode are full tensors with which DTensor computes shapes
        return not isinstance(tensor, FakeTensor) or tensor.fake_mode is self._mode

    def _count_kernel(
        self, operation: Any, name: str, args: Any, options: Any, outputs: Any, tensors: Sequence[Tensor]
    ) -> None:
        """Count a launch, and the operations of a product or of attention, or the bytes of any other kernel."""
        if not all(self._is_counted(tensor) for tensor in tensors):
            return
        self.counts.kernels[name] += 1
        self.counts.launches[self._labels[-1]] += 1
        operands = [arg for arg in args if isinstance(arg, Tensor)]
        operand = operands[-1] if name in _PRODUCTS else next(iter(operands), _NONE)
        if name in _PRODUCTS:
            operations = 2 * operands[-2].numel() * operand.shape[-1]
        elif name in _ATTENTION:
            passes = 2.5 if "backward" in name else 1.0  # backward has five products and forward has two
            operand = args[1] if "backward" in name else args[0]  # the queries [T, H, D]
            # a token sees half of its document on average
            operations = int(passes * 2 * operand.numel() * self._document_tokens)
        else:
            flops = flop_registry.get(operation.overloadpacket)
            operations = 0 if flops is None else flops(*args, **options, out_val=outputs)
        if operations:
            self.counts.products[str(operand.dtype).removeprefix("torch.")] += operations
        else:
            self.counts.traffic += sum(tensor.nbytes for tensor in tensors)

    def _count_wait(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], inputs: Sequence[Tensor]
    ) -> None:
        # if an index is a mask, the host waits for the number of selected elements, except when torch assigns a
        # single value to all of them
        is_masked = (name == "index" or (name in ("index_put", "index_put_") and args[2].numel() > 1)) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # CUDA has one kernel for all groups only in bfloat16; in other dtypes, the host reads the ends of the groups
        # and launches a product for each group
        is_looped = name == "_grouped_mm" and inputs[0].dtype != torch.bfloat16
        if (name in _READS or is_masked or is_looped) and any(map(_is_on_device, inputs)):
            self._wait(name)
        if name not in _COPIES:
            return
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else torch.device(options.get("device") or source.device)
        if target.type == source.device.type:
            return
        if not options.get("non_blocking", False) and not (name == "copy_" and len(args) > 2 and args[2]):
            self._wait(f"{source.device.type} to {target.type}")
        elif source.device.type == "cpu" and source.untyped_storage() not in self._pinned:
            self.counts.pageable[_place()] += 1

    def _wait(self, reason: str) -> None:
        self.counts.waits[f"{_place()}: {reason}"] += 1

    def _count_message(self, name: str, args: Sequence[Any], inputs: Sequence[Tensor]) -> None:
        if name == "wait_tensor":
            return
        groups: dict[str, ProcessGroup] = {name: group for group, name in distributed_c10d._world.pg_names.items()}
        axis = "all"
        for leaf in tree_leaves(args):
            group = groups.get(leaf) if isinstance(leaf, str) else None  # other strings name reductions
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
                group = ProcessGroup.unbox(leaf)
            if group is not None:
                axis = self._axes.get(group.group_name, group.group_desc)
                break
        key = f"{axis} {name.strip('_')}"
        self.counts.messages[key] += 1
        self.counts.sent[key] += max((tensor.nbytes for tensor in inputs), default=0)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (self._labels[-1], 0)
            weakref.finalize(storage, self._free, storage._cdata)
        self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        label, before = self._storages[key]
        self._storages[key] = (label, size)
        self.now[label] += size - before
        self._total += size - before
        if self._total > self._largest:
            self._largest = self._total
            self.counts.peak = {purpose: held for purpose, held in self.now.items() if held}

    def _free(self, key: int) -> None:
        label, size = self._storages.pop(key)
        self.now[label] -= size
        self._total -= size

    def __enter__(self) -> Self:
        # FSDP frees and allocates gathered weights by resizing their storage, which no dispatch mode sees
        self._resize_storage = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._storages:
                self._resize(storage._cdata, size)

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize_storage  # type: ignore[method-assign]
        super().__exit__(*error)


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"  # not `is_cuda`, for which a fake tensor dispatches an operation


def _place() -> str:
    """Return the innermost function of this package (without `plan/`) in the stack, or else that of transformers."""
    frame, other = sys._getframe(1), None
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        path = file.removeprefix(_PACKAGE)  # the folder of a clone can also be named stillhouse
        if path != file and not path.startswith("plan/"):
            return f"stillhouse/{path}:{function}"
        if other is None and "/transformers/" in file:
            other = f"transformers/{file.rpartition('/transformers/')[2]}:{function}"
        frame = frame.f_back  # type: ignore[assignment]
    return other or "torch"
