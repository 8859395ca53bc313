"""Evaluates and predicts for a `transformers.Trainer`: each row once, on all workers, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.team.gather_trees import from_main

_LOSS, _COUNT, _LOGITS, _LABELS, _INPUTS = "loss", "count", "logits", "labels", "inputs"


def evaluation_loop(
    trainer: Any,
    hf_trainer: Any,
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> Any:
    """Takes the place of `transformers.Trainer.evaluation_loop`, with the same arguments and result.

    The loss is the mean over the items of all rows. Metrics are computed by the main worker from the outputs for all
    rows; predictions are returned on all workers.
    """
    from transformers.trainer_utils import EvalLoopOutput

    args = hf_trainer.args
    only_loss = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    hf_trainer.callback_handler.eval_dataloader = dataloader
    hf_trainer.paceline_outputs = EvalOutputs(hf_trainer, only_loss, ignore_keys)
    dataset, collate = dataloader.dataset, dataloader.collate_fn
    if only_loss:
        results = trainer.evaluate(dataset, _mean_loss, collate=collate)
        metrics = {f"{metric_key_prefix}_loss": results["loss"]} if "loss" in results else {}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=results["n"])
    parts = [(len(rows), output) for rows, output in trainer.predict(dataset, collate=collate)]
    metrics, number, kept = {}, 0, {}
    if trainer.main:
        number = sum(rows for rows, _ in parts)
        kept = {name: _joined([output[name] for _, output in parts]) for name in parts[0][1]} if parts else {}
        metrics = _metrics(hf_trainer, parts, kept, number, metric_key_prefix)
    metrics, number = from_main([metrics, number])
    predictions, labels = kept.get(_LOGITS), kept.get(_LABELS)
    if description == "Prediction":  # which the script gets
        predictions, labels = from_main([predictions, labels])
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=metrics, num_samples=number)


class EvalOutputs:
    """What `forward` returns for a micro-batch in evaluation: tensors with a row for each row of the batch."""

    def __init__(self, hf_trainer: Any, only_loss: bool, ignore_keys: list[str] | None) -> None:
        self._hf, self._only_loss, self._ignore = hf_trainer, only_loss, ignore_keys

    def __call__(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        hf = self._hf
        items, rows = hf._get_num_items_in_batch([inputs], hf.args.device), count_rows(inputs)
        name = getattr(hf.model, "main_input_name", "input_ids")
        kept = inputs.get(name) if "inputs" in hf.args.include_for_metrics else None
        loss, logits, labels = hf.prediction_step(model, dict(inputs), self._only_loss, ignore_keys=self._ignore)
        out: dict[str, Any] = {}
        if loss is not None:
            out[_LOSS] = loss.detach().expand(rows)
            count = torch.as_tensor(rows if items is None else items, device=loss.device)
            out[_COUNT] = count.to(loss.dtype).expand(rows)
        if self._only_loss:
            return out
        if hf.preprocess_logits_for_metrics is not None and logits is not None:
            logits = hf.preprocess_logits_for_metrics(logits, labels)
        more = {_LOGITS: logits, _LABELS: labels, _INPUTS: kept}
        return out | {name: value for name, value in more.items() if value is not None}


def count_rows(inputs: Mapping[str, Any]) -> int:
    """The number of rows of a collated batch."""
    return next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim())


def _mean_loss(output: dict[str, Any], batch: Any) -> dict[str, Any]:
    """The sum of the losses of a micro-batch and the number of its items; both are the same in all its rows."""
    if _LOSS not in output:
        return {}
    count = output[_COUNT][0]
    return {"loss": (torch.where(count > 0, output[_LOSS][0].double() * count, 0.0), count)}


def _metrics(hf: Any, parts: list[tuple[int, Any]], kept: dict[str, Any], number: int, prefix: str) -> dict[str, float]:
    """The metrics of all rows, from the outputs by micro-batch and joined."""
    from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

    metrics: dict[str, Any] = {}
    if hf.compute_metrics is not None and _LOGITS in kept and _LABELS in kept:
        more = {name: kept[name] for name in (_INPUTS,) if name in kept}
        if "loss" in hf.args.include_for_metrics:
            more["losses"] = kept[_LOSS]
        metrics = hf.compute_metrics(EvalPrediction(predictions=kept[_LOGITS], label_ids=kept[_LABELS], **more))
    metrics = denumpify_detensorize(dict(metrics))
    pairs = [(float(out[_LOSS][0]), float(out[_COUNT][0])) for _, out in parts if _LOSS in out]
    if total := sum(count for _, count in pairs):
        metrics["loss"] = sum(loss * count for loss, count in pairs if count) / total
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in metrics.items()}


def _joined(parts: list[Any]) -> Any:
    """The outputs of all micro-batches as arrays; shorter rows are padded with -100, as transformers does."""
    from transformers.trainer_pt_utils import nested_concat, nested_numpify

    joined = parts[0]
    for part in parts[1:]:
        joined = nested_concat(joined, part, padding_index=-100)
    return nested_numpify(joined)
