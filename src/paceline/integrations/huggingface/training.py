"""`paceline.hf.train(hf_trainer)`: the training loop of a `transformers.Trainer`, run by a Paceline Trainer.

The flow: the arguments are checked; a `Trainer` is made from the object's model, loss, optimizer and schedule; after
each step of its loop comes what transformers does there, through the object's own methods and callbacks.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data.sampler_order import SamplerOrder
from paceline.errors import UsageError
from paceline.integrations.huggingface.arguments import check_arguments, merged_plan
from paceline.integrations.huggingface.callbacks import Flow, Span, check_callbacks
from paceline.integrations.huggingface.evaluation import count_rows, evaluation_loop
from paceline.integrations.huggingface.model_folder import save_model
from paceline.trainer import Trainer

_LOOP = (
    "_inner_training_loop",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "evaluation_loop",
    "_clip_grad_norm",
    "train",
)


def trainer(
    model: Any, args: Any, train_dataset: Any, *, plan: str | None = None, global_batch: int | None = None, **given: Any
) -> Any:
    """Makes a `transformers.Trainer` and trains it with `train`.

    The model stays in host memory until its weights are cut, so a GPU gets only its part of them. A
    `transformers.Trainer` that a script makes puts the complete model on the GPU of each worker first.

    Args:
        model: The model, or a function without arguments that makes it.
        args: The `transformers.TrainingArguments`.
        train_dataset: The rows.
        plan: As in `train`.
        global_batch: As in `train`.
        given: Other arguments of `transformers.Trainer`.

    Returns:
        The `transformers.Trainer`, trained: `evaluate`, `predict` and `save_model` run on all workers together.
    """
    import transformers

    class OnHost(transformers.Trainer):  # type: ignore[misc]
        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            """Leaves the model in host memory: Paceline's Trainer moves it."""

    built = {"model_init": model} if not isinstance(model, nn.Module) and callable(model) else {"model": model}
    made = OnHost(args=args, train_dataset=train_dataset, **built, **given)
    train(made, plan=plan, global_batch=global_batch)
    return made


def train(
    hf_trainer: Any, *, plan: str | None = None, global_batch: int | None = None, save_frozen: bool | None = None
) -> Any:
    """Trains what a `transformers.Trainer` describes; takes the place of ``hf_trainer.train()``.

    Started by `paceline run`, all workers train one model together, and the same command resumes a run. Started by
    `python`, it trains alone. Afterwards `hf_trainer.evaluate()`, `predict()` and `save_model()` run on all workers.

    Args:
        hf_trainer: A `transformers.Trainer`, or an object of a subclass such as TRL's `SFTTrainer`.
        plan: How the work is spread; words for precision and recomputation come from the training arguments.
        global_batch: Rows of one optimizer step, over all workers; by default ``per_device_train_batch_size *
            gradient_accumulation_steps``.
        save_frozen: Whether checkpoints hold parameters that are not trained; by default they do, except for peft
            models, whose checkpoints have the adapter alone.

    Returns:
        The `transformers.trainer_utils.TrainOutput`: steps, mean loss and metrics.

    Raises:
        UsageError: A training argument, a callback or an overridden method cannot be honoured; the message names it.

    Example:
        >>> hf_trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
        >>> paceline.hf.train(hf_trainer)
        >>> hf_trainer.save_model("finetuned")
    """
    return Training(hf_trainer, plan, global_batch, save_frozen).run()


def refuse_overridden(hf_trainer: Any) -> None:
    """Raises UsageError if a subclass replaces a part of transformers' loop that Paceline replaces, too."""
    import transformers

    for name in _LOOP:
        method = inspect.getattr_static(type(hf_trainer), name, None)
        home = next((one for one in type(hf_trainer).__mro__ if name in vars(one)), transformers.Trainer)
        if method is not inspect.getattr_static(transformers.Trainer, name, None) and not _calls_base(method, name):
            what = f"{home.__name__}.{name}() replaces a part of the training loop that paceline.hf replaces, too"
            raise UsageError(what, "move its code to compute_loss() or to a callback, or use paceline run --raw")


def _calls_base(method: Any, name: str) -> bool:
    """Whether a method does something around the base class's method, such as TRL's `train`."""
    try:
        return f"super().{name}(" in inspect.getsource(method)
    except (OSError, TypeError):
        return False


class Losses:
    """The loss of one micro-batch, by the trainer's own `training_step`."""

    def __init__(self, hf_trainer: Any) -> None:
        self._hf, self._loss = hf_trainer, list[torch.Tensor]()
        hf_trainer.current_gradient_accumulation_steps = 1
        hf_trainer.accelerator.backward = self._keep

    def _keep(self, loss: torch.Tensor, **_: Any) -> None:
        """Takes the place of the backward pass, which Paceline makes."""
        self._loss.append(loss)

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """Returns the mean loss of the micro-batch; in evaluation, the outputs that `evaluation_loop` asks for."""
        hf, inputs = self._hf, dict(batch)
        if not model.training:
            return hf.paceline_outputs(model, inputs)
        items = hf._get_num_items_in_batch([inputs], hf.args.device)
        self._loss.clear()
        hf.training_step(model, inputs, None if items is None else torch.as_tensor(items).clamp(min=1))
        return self._loss.pop()

    def loss(self, output: torch.Tensor, batch: Mapping[str, Any]) -> Any:
        """Returns the sum of the losses and the number of items: tokens or rows, as transformers counts them."""
        items = self._hf._get_num_items_in_batch([batch], self._hf.args.device)
        count = count_rows(batch) if items is None else items
        return output * count, count


class Optimizers:
    """The optimizer and the schedule that a `transformers.Trainer` makes, for the parameters of a worker."""

    def __init__(self, hf_trainer: Any, steps: int) -> None:
        self._hf, self._steps = hf_trainer, steps
        made = hf_trainer.create_optimizer()
        if not isinstance(made, torch.optim.Optimizer):
            kind = type(made).__name__
            what = f"create_optimizer() returned a {kind}, which is not a torch.optim.Optimizer"
            raise UsageError(what, "return an optimizer of torch's kind")
        names = {id(param): name for name, param in hf_trainer.model.named_parameters()}
        left_out = {"params", "fused", "foreach", "initial_lr"}  # Paceline chooses the kernel
        self._groups = [
            ({k: v for k, v in group.items() if k not in left_out}, [names[id(param)] for param in group["params"]])
            for group in made.param_groups
        ]
        self._class, known = type(made), inspect.signature(type(made)).parameters
        self._options = {k: v for k, v in made.defaults.items() if k in known and k not in left_out}
        self._given, hf_trainer.optimizer = hf_trainer.lr_scheduler, None

    def make(self, params: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Makes the optimizer for these parameters, in the groups of the full model."""
        by_name = dict(params)
        groups = [
            {**options, "params": [(name, by_name[name]) for name in names if name in by_name]}
            for options, names in self._groups
        ]
        made = self._class([group for group in groups if group["params"]] or groups, **self._options)
        self._hf.optimizer = made
        return made

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Makes the schedule that `create_scheduler` makes, for this optimizer."""
        given = self._given
        if given is not None and not self._hf._created_lr_scheduler:
            if not isinstance(given, torch.optim.lr_scheduler.LambdaLR):
                what = f"the scheduler {type(given).__name__} of optimizers= is bound to another optimizer"
                raise UsageError(what, "say it as TrainingArguments(lr_scheduler_type=...), or pass a LambdaLR")
            return torch.optim.lr_scheduler.LambdaLR(optimizer, given.lr_lambdas)
        self._hf.lr_scheduler = None
        return self._hf.create_scheduler(self._steps, optimizer)


class Rows:
    """The rows of training in the order of transformers' own sampler, and how they are collated."""

    def __init__(self, hf_trainer: Any) -> None:
        loader = hf_trainer.get_train_dataloader()
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        is_iterable = isinstance(self.dataset, torch.utils.data.IterableDataset)
        self.order = None if is_iterable else SamplerOrder(loader.batch_sampler)
        self.count = None if self.order is None else len(self.order)


class Training:
    """One call of `train`: makes the Paceline Trainer and runs its loop."""

    def __init__(self, hf_trainer: Any, plan: str | None, global_batch: int | None, save_frozen: bool | None) -> None:
        refuse_overridden(hf_trainer)
        args = hf_trainer.args
        check_arguments(args)
        check_callbacks(hf_trainer)
        self.hf, self.args = hf_trainer, args
        args._n_gpu = 1  # one device per worker: transformers must not split a batch over all devices of this machine
        self._prepare_model()
        batch = global_batch or args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.rows = Rows(hf_trainer)
        span = self.span = self._measure_span(batch)
        losses, optimizers = Losses(hf_trainer), Optimizers(hf_trainer, span.steps)
        self.trainer = hf_trainer.paceline = Trainer(
            model=lambda: hf_trainer.model,  # a function: the weights reach the device cut, one parameter at a time
            forward=losses.forward,
            loss=losses.loss,
            optimizer=optimizers.make,
            schedule=self._schedule(optimizers),
            global_batch=batch,
            clip_norm=args.max_grad_norm or None,
            seed=args.seed,
            plan=merged_plan(args, plan) or None,
        )
        is_adapter = hasattr(hf_trainer.model, "peft_config")
        self.trainer.save_frozen = not is_adapter if save_frozen is None else save_frozen
        hf_trainer.model_wrapped = hf_trainer.model
        hf_trainer.evaluation_loop = lambda *given, **named: evaluation_loop(self.trainer, hf_trainer, *given, **named)
        hf_trainer.save_model = lambda output_dir=None, _internal_call=False: save_model(
            self.trainer, hf_trainer, output_dir
        )
        hf_trainer.is_world_process_zero = hf_trainer.is_local_process_zero = lambda: self.trainer.main
        self.flow = Flow(self.trainer, hf_trainer, span)

    def _prepare_model(self) -> None:
        """What transformers does to the model before its loop."""
        hf, args = self.hf, self.args
        from transformers import trainer as module

        if hf.model_init is not None:
            hf.model = hf.call_model_init(None)
            hf.optimizer = hf.lr_scheduler = None
        if args.use_liger_kernel:
            module.apply_liger_kernel(hf.model, args.liger_kernel_config)
        has_tokens = hasattr(hf.processing_class, "pad_token_id") or hasattr(hf.processing_class, "tokenizer")
        if has_tokens and hasattr(hf.model, "config"):
            module.align_special_tokens(hf.model, hf.processing_class)
        if hf.neftune_noise_alpha is not None:
            hf.neftune_hook_handle = module.activate_neftune(hf.model, hf.neftune_noise_alpha, hf.accelerator)
        hf.model.train()  # from_pretrained() returns a model in evaluation mode
        hf.is_in_train = True

    def _measure_span(self, batch: int) -> Span:
        args, rows = self.args, self.rows.count
        if rows is None and args.max_steps <= 0:
            raise UsageError("the training dataset has no length", "pass TrainingArguments(max_steps=...)")
        per_epoch = args.max_steps if rows is None else max(1, -(-rows // batch))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        return Span(steps, per_epoch, batch, rows, args.per_device_train_batch_size)

    def _schedule(self, optimizers: Optimizers) -> Any:
        if self.args.lr_scheduler_type != "reduce_lr_on_plateau":
            return optimizers.schedule
        from paceline.compute.lr_schedules import plateau

        return plateau(metric_name(self.args), **(self.args.lr_scheduler_kwargs or {}))

    def run(self) -> Any:
        """Trains, and returns transformers' TrainOutput."""
        hf, args, trainer, flow = self.hf, self.args, self.trainer, self.flow
        if args.load_best_model_at_end:
            if trainer.main and trainer.run_dir is None:
                what = "TrainingArguments(load_best_model_at_end=True) needs a run folder for the best checkpoint"
                raise UsageError(what, "start the script with `paceline run`")
            trainer.keep_best(metric_name(args), "max" if args.greater_is_better else "min")
        loader = {
            "num_workers": args.dataloader_num_workers,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
        options = {name: value for name, value in loader.items() if value}
        started = time.time()
        flow.begin()
        for report in trainer.steps(
            self.rows.dataset, count=self.span.steps, collate=self.rows.collate, order=self.rows.order, loader=options
        ):
            flow.follow(report)
        metrics = flow.finish(started)
        if args.load_best_model_at_end and trainer.best.value is not None:
            trainer.load_best()
        hf.control = hf.callback_handler.on_train_end(args, hf.state, hf.control)
        if hf.neftune_noise_alpha is not None:
            hf.neftune_hook_handle.remove()
        hf.is_in_train = False
        from transformers.trainer_utils import TrainOutput

        return TrainOutput(hf.state.global_step, metrics["train_loss"], metrics)


def metric_name(args: Any) -> str:
    """The name of the value that decides which checkpoint is the best, as evaluation reports it."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"
