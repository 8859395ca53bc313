"""The private names of torch that the package uses, and the torch versions it is tested with.

Torch may rename or remove a private name in any release. `NAMES` lists each one with its purpose and the versions on
which it was checked. `tests/integrations/test_torch_private_names.py` looks every name up in the installed torch, and
finds the private names in the source that are missing from the list. Before you add a name, look for a public
interface.

Names that several modules use are imported from here, so that a change in torch is repaired in one place.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import _get_sequence_nr as autograd_nodes_made
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.overrides import _len_torch_function_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _pop_mode_temporarily as without_innermost_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _pytree as pytree

__all__ = [
    "BatchNormBase",
    "NAMES",
    "PrivateName",
    "TESTED",
    "autograd_nodes_made",
    "backend_of_compile",
    "default_device_mode",
    "function_modes_taken",
    "has_global_optimizer_hooks",
    "innermost_function_mode",
    "keep_out_of_compile",
    "pop_function_mode",
    "push_function_mode",
    "pytree",
    "untested",
    "without_innermost_mode",
]

TESTED = ("2.13", "2.14", "2.15")  # the same bounds as in pyproject.toml


def untested(version: str) -> str:
    """A warning for a torch that is newer than every version in `TESTED`, and nothing for any other."""
    match = re.match(r"(\d+)\.(\d+)", version)
    newest = TESTED[-1]
    major, minor = map(int, newest.split("."))
    if match is None or (int(match[1]), int(match[2])) <= (major, minor):
        return ""
    return (
        f"torch {version} is newer than {newest}, the newest version that Paceline is tested with; "
        f"if something fails, try: pip install 'torch<{major}.{minor + 1}'"
    )


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch. In `path`, ``Class()`` stands for an instance, for attributes that a class lacks."""

    path: str
    purpose: str
    checked: tuple[str, ...] = TESTED


NAMES = [
    # -- tensors ------------------------------------------------------------------------------------------------
    PrivateName(
        "torch.Tensor._backward_hooks", "find gradient hooks, which would see other gradients than they expect"
    ),
    PrivateName("torch.Tensor._post_accumulate_grad_hooks", "the same for hooks that run after accumulation"),
    PrivateName("torch.Tensor._use_count", "whether gloo has let go of a tensor"),
    PrivateName("torch.Tensor._version", "notice that a tensor was written to"),
    PrivateName("torch.Tensor._is_view", "context=: tell a view from a tensor of its own"),
    PrivateName("torch.Tensor._base", "the tensor that a view shows"),
    PrivateName("torch.Tensor._indices", "rows of a sparse gradient that is not coalesced; indices() demands that"),
    PrivateName("torch.Tensor._values", "the values of those rows"),
    PrivateName("torch.Tensor._make_wrapper_subclass", "tensors of a checkpoint whose values are read when used"),
    PrivateName("torch.UntypedStorage._cdata", "the identity of a storage without memory"),
    PrivateName("torch._foreach_norm", "the norms of many tensors in one call"),
    PrivateName("torch._foreach_mul_", "scale many gradients in one call"),
    PrivateName("torch._foreach_zero_", "clear many gradients in one call"),
    PrivateName("torch._foreach_copy_", "restore many buffers in one call"),
    PrivateName("torch.ops.aten._safe_softmax", "attention of a query that may see nothing gives zeros"),
    PrivateName("torch.ops.aten._local_scalar_dense", "a model that looks at a value while it is built without memory"),
    PrivateName("torch.ops.aten.add.Tensor._schema", "which arguments of an operation are written or name a device"),
    PrivateName("torch.utils._pytree.tree_flatten", "the tensors in batches, outputs and arguments"),
    PrivateName("torch.utils._pytree.tree_iter", "the same"),
    PrivateName("torch.utils._pytree.tree_leaves", "the same"),
    PrivateName("torch.utils._pytree.tree_map", "the same"),
    PrivateName("torch.utils._pytree.tree_map_only", "the same"),
    PrivateName("torch.utils._pytree.tree_unflatten", "the same"),
    PrivateName("torch.utils.data._utils.collate.collate_tensor_fn", "collate without copying through shared memory"),
    PrivateName("torch.utils.data._utils.collate.default_collate_fn_map", "the types that torch's collation knows"),
    PrivateName("torch.cuda.memory._dump_snapshot", "lists the allocations of a GPU when its memory runs out"),
    PrivateName("torch.mps._get_default_mps_generator", "save and restore the generator of Apple GPUs"),
    # -- autograd and modes -------------------------------------------------------------------------------------
    PrivateName("torch.autograd._get_sequence_nr", "which module made a node of the graph"),
    PrivateName("torch.autograd.Node()._sequence_nr", "the same"),
    PrivateName("torch._C.DisableTorchFunction", "call a Function's apply() without seeing it again"),
    PrivateName("torch._C.DisableTorchFunctionSubclass", "look at a tensor of tiled logits as at any tensor"),
    PrivateName("torch._C._len_torch_function_stack", "pipeline=: whether our mode is the innermost one"),
    PrivateName("torch._C._get_function_stack_at", "the same"),
    PrivateName("torch.overrides._pop_mode_temporarily", "pipeline=: run a block without our mode"),
    PrivateName("torch.overrides._len_torch_function_stack", "a mode around the body of a loop, under the script's"),
    PrivateName("torch.overrides._pop_mode", "the same"),
    PrivateName("torch.overrides._push_mode", "the same"),
    PrivateName("torch._GLOBAL_DEVICE_CONTEXT", "the mode of torch's default device, which has to be the outermost"),
    PrivateName("torch._subclasses.fake_tensor.FakeTensor", "build a model without memory for its large tensors"),
    PrivateName("torch._subclasses.fake_tensor.FakeTensorMode", "the same"),
    PrivateName("torch._subclasses.fake_tensor.FakeTensorMode().fake_tensor_converter.tensor_memo", "forget them"),
    PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "record the operations that build this model"),
    PrivateName("torch._dynamo", "import it once, in the process that workers are forked from"),
    PrivateName("torch._dynamo.lookup_backend", "the compiler that gets the code that computes with shards"),
    PrivateName("torch._C._dynamo.eval_frame._FrameExecStrategy", "keep torch.compile out of the backend's methods"),
    PrivateName("torch._C._dynamo.eval_frame._FrameAction", "the same"),
    PrivateName("torch._C._dynamo.eval_frame.set_code_exec_strategy", "the same"),
    PrivateName("torch._C._current_graph_task_id", "whether a backward is running"),
    PrivateName("torch._ops.HigherOrderOperator", "refuse what compiled code with tensor= and context= cannot have"),
    PrivateName(
        "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "see its operator in a mode",
        ("2.13",),
    ),
    PrivateName("torch._dynamo.config.recompile_limit", "compile this operator for any number of masks", ("2.13",)),
    PrivateName("torch._dynamo.exc.TorchDynamoException", "explain why code cannot be compiled"),
    PrivateName("torch.compiler.disable()._torchdynamo_disable", "the same, for methods that torch.compile inlines"),
    # -- modules and schedulers ---------------------------------------------------------------------------------
    PrivateName("torch.nn.Parameter()._is_param", "which inputs of traced code are parameters"),
    PrivateName("torch.nn.Module()._buffers", "a module's own buffers, which named_buffers() removes duplicates from"),
    PrivateName("torch.nn.Module()._parameters", "put a parameter where another one was, without registering it again"),
    PrivateName("torch.nn.Module()._non_persistent_buffers_set", "which buffers a checkpoint leaves out"),
    PrivateName("torch.nn.Module()._forward_hooks", "put a module's hooks aside while its block is tried"),
    PrivateName("torch.nn.Module()._forward_hooks_with_kwargs", "call a hook as torch calls it"),
    PrivateName("torch.nn.Module()._forward_pre_hooks", "find the hook of spectral_norm"),
    PrivateName("torch.nn.Module()._backward_hooks", "find hooks on gradients of modules"),
    PrivateName("torch.nn.Module()._backward_pre_hooks", "the same"),
    PrivateName("torch.optim.optimizer._global_optimizer_pre_hooks", "find hooks on all optimizers"),
    PrivateName("torch.optim.optimizer._global_optimizer_post_hooks", "the same"),
    PrivateName("torch.nn.modules.module._global_backward_hooks", "the same for hooks on all modules"),
    PrivateName("torch.nn.modules.module._global_backward_pre_hooks", "the same"),
    PrivateName("torch.nn.modules.batchnorm._BatchNorm", "all kinds of BatchNorm, those of other packages included"),
    PrivateName("torch.nn.utils.parametrizations._SpectralNorm", "the buffers of spectral_norm"),
    PrivateName("torch.nn.utils.parametrizations._SpectralNorm()._u", "the same"),
    PrivateName("torch.nn.utils.parametrizations._SpectralNorm()._v", "the same"),
    PrivateName("torch.nn.MultiheadAttention()._qkv_same_embed_dim", "which weights an attention layer has"),
    PrivateName("torch.optim.lr_scheduler.SequentialLR()._schedulers", "scale the rates of schedulers inside one"),
    PrivateName("torch.optim.lr_scheduler.LRScheduler()._last_lr", "scale the rate that a scheduler goes on from"),
    PrivateName("torch.optim.Optimizer()._opt_called", "no warning of a scheduler whose optimizer steps elsewhere"),
    # -- checkpoints of other programs --------------------------------------------------------------------------
    PrivateName("torch._weights_only_unpickler.load", "read the metadata of torch.distributed.checkpoint safely"),
    PrivateName("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "a class that it may contain"),
    PrivateName("torch.distributed.checkpoint.filesystem._StorageInfo", "the same"),
    # -- fully_shard --------------------------------------------------------------------------------------------
    PrivateName("torch.distributed.tensor.DTensor._local_tensor", "the rows that are here; to_local() is recorded"),
    PrivateName("torch.distributed.tensor.DTensor._op_dispatcher", "a number read of pieces is that of the whole"),
    PrivateName("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", "the same"),
    PrivateName("torch.distributed.fsdp._fully_shard._fsdp_api.AllGather", "name each gathering in errors"),
    PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "make the whole model the root"),
    PrivateName("torch.distributed.fsdp.FSDPModule()._lazy_init", "the same"),
    PrivateName("torch.distributed.fsdp.FSDPModule()._state_ctx", "whether a call of a block is part of a forward"),
    # -- torch.distributed --------------------------------------------------------------------------------------
    PrivateName(
        "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",
        "no recorder of torch for our groups",
        ("2.15",),
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "`paceline run --raw`: choose the backend of every group, for any caller",
        ("2.13",),
    ),
    PrivateName("torch.distributed.distributed_c10d._world.pg_map", "refuse collectives of the script's in its loss"),
    PrivateName("torch.distributed.ProcessGroup._device_types", "torch asks our group for its devices"),
    PrivateName("torch.distributed.ProcessGroup._get_backend", "torch asks our group for the backend of a device"),
    PrivateName("torch.distributed.ProcessGroup._get_sequence_number_for_group", "torch asks our group for it"),
    PrivateName("torch.distributed.ProcessGroup._set_sequence_number_for_group", "torch sets it", ("2.13",)),
    PrivateName("torch.distributed.ProcessGroup._allgather_base", "an older name, which torch still calls"),
    PrivateName("torch.distributed.ProcessGroup._reduce_scatter_base", "an older name, which torch still calls"),
    PrivateName("torch.distributed.Work._source_rank", "who sent a message that was received from anybody"),
    PrivateName("torch.distributed.ProcessGroupGloo._Options", "gloo between hosts: devices, threads, timeout"),
    PrivateName("torch.distributed.ProcessGroupGloo._Options()._devices", "the same"),
    PrivateName("torch.distributed.ProcessGroupGloo._Options()._threads", "the same"),
    PrivateName("torch.distributed.ProcessGroupGloo._Options()._timeout", "the same"),
    PrivateName("torch.distributed.ProcessGroupGloo._allgather_base", "torch 2.13 has no public name for it"),
    PrivateName("torch.distributed.ProcessGroupNCCL._reduce_scatter_base", "torch 2.13 has no public name for it"),
    PrivateName("torch.distributed.ProcessGroupNCCL.Options()._timeout", "NCCL's deadline"),
]


def has_global_optimizer_hooks() -> bool:
    """Whether the script has registered hooks that run at each step of all optimizers."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def backend_of_compile(name: str) -> Any:
    """The backend of ``torch.compile`` with this name: a function of a graph and its inputs."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def innermost_function_mode() -> Any:
    """The TorchFunctionMode that sees a call first, or None."""
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


def default_device_mode() -> Any:
    """The mode that ``torch.set_default_device`` has entered in this thread, if any."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def function_modes_taken() -> list[Any]:
    """Takes off all modes of the kind TorchFunctionMode, the innermost first, to be put back one by one."""
    return [pop_function_mode() for _ in range(function_modes())]


def keep_out_of_compile(kind: type) -> None:
    """Keeps ``torch.compile`` out of a class's methods: it stumbles over classes derived from torch's compiled ones."""
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in vars(kind).values():
        while inspect.isfunction(method):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(method.__code__, skip)
            method = getattr(method, "__wrapped__", None)
