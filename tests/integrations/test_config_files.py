"""`paceline from`: configurations of DeepSpeed, Accelerate and FSDP become plans and Trainer arguments."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import config_pages
import pytest
import torch
from config_oracle import CASES, OneCycle, Warmup, reference_rates, reference_weights, script_for
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import paceline
from safetensors.torch import load_file

from paceline.errors import FormatError, PacelineError, UsageError
from paceline.integrations.configs.accelerate import DEEPSPEED_FIELDS, PREFIXES, convert_accelerate
from paceline.integrations.configs.accelerate_fields import ACCELERATE
from paceline.integrations.configs.command import convert_file
from paceline.integrations.configs.conversion import NO_EFFECT, REFUSED, UNKNOWN, USED, Conversion, FieldTable, leaves
from paceline.integrations.configs.deepspeed import convert_deepspeed
from paceline.integrations.configs.deepspeed_fields import DEEPSPEED
from paceline.integrations.configs.optimizers import TORCH_OPTIMIZERS
from paceline.integrations.configs.report import json_of, script_of, text_of
from paceline.integrations.configs.schedules import TORCH_SCHEDULERS
from paceline.integrations.configs.training_arguments import AUTO_FIELDS, DEFAULTS, fill_auto, read_settings
from paceline.plan import Plan


def verdicts(conversion: Conversion) -> dict[str, str]:
    return {name: one.verdict for name, one in conversion.settled.items()}


def schedule_of(conversion: Conversion) -> Any:
    namespace: dict[str, Any] = {"math": math, "dataset": range(96)}
    exec("\n".join(conversion.definitions), namespace)
    return namespace["schedule"]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ---- tables


@pytest.mark.parametrize("table", [DEEPSPEED, ACCELERATE], ids=lambda table: table.tool)
def test_each_field_is_in_exactly_one_table(table: FieldTable) -> None:
    names = table.names()
    assert len(names) == len(set(names))
    free = [name for name in table.names() if name not in table.sections]
    assert [name for name in free if table.section_of(name)] == []


@pytest.mark.parametrize("name", config_pages.TABLES)
def test_the_pages_have_the_tables_of_the_code(name: str) -> None:
    text = (config_pages.PAGES / name).read_text()
    assert text == config_pages.page(text, config_pages.TABLES[name]), "run python tests/support/config_pages.py"
    assert text.count("\n| `") > 40


def test_accelerate_has_no_field_that_the_table_lacks() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    launch = pytest.importorskip("accelerate.commands.launch")
    heads = {name.partition(".")[0] for name in ACCELERATE.names()}
    for kind in (config_args.ClusterConfig, config_args.SageMakerConfig):
        assert {one.name for one in dataclasses.fields(kind)} - heads == set()
    options = [action.dest for action in launch.launch_command_parser()._actions]
    names = set(ACCELERATE.names())
    checked = 0
    for section, prefix in {**PREFIXES, "mpirun_config": "mpirun_", "deepspeed_config": ""}.items():
        alike = ("zero", "offload", "gradient", "deepspeed") if section == "deepspeed_config" else (prefix,)
        for option in (option for option in options if option.startswith(alike)):
            assert f"{section}.{option}" in names
            checked += 1
    assert checked > 50


@pytest.mark.slow
def test_transformers_reads_no_field_of_fsdp_that_the_table_lacks() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    source = inspect.getsource(arguments._process_fsdp_args)
    names = set(re.findall(r"""(?<!xla_)fsdp_config(?:\.\w+\(|\[)["'](\w+)["']""", source))
    assert {"xla", "version", "reshard_after_forward", "limit_all_gathers"} <= names
    assert {f"fsdp_config.fsdp_{name}" for name in names} - set(ACCELERATE.names()) == set()


def test_arguments_of_torch_are_those_of_torch() -> None:
    for name, arguments in TORCH_OPTIMIZERS.items():
        assert arguments == set(inspect.signature(getattr(torch.optim, name)).parameters) - {"params"}, name
    for name, arguments in TORCH_SCHEDULERS.items():
        known = set(inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters)
        assert arguments == known - {"optimizer", "last_epoch", "scale_fn"}, name


def test_auto_is_filled_as_transformers_fills_it() -> None:
    """transformers' own code fills a configuration with "auto" in every field that it knows."""
    transformers = pytest.importorskip("transformers")
    filling = pytest.importorskip("transformers.integrations.deepspeed").HfTrainerDeepSpeedConfig
    known = pytest.importorskip("accelerate.utils.deepspeed").HfDeepSpeedConfig
    fields = {one.name: one.default for one in dataclasses.fields(transformers.TrainingArguments)}
    assert {name: fields[name] for name in DEFAULTS} == DEFAULTS
    config: dict[str, Any] = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    for name in [*AUTO_FIELDS, "scheduler.params.total_num_steps"]:
        *heads, last = name.split(".")
        section = config
        for head in heads:
            section = section.setdefault(head, {})
        section[last] = "auto"
    given = {**DEFAULTS, "learning_rate": 0.002, "warmup_steps": 7, "bf16": True, "adam_beta2": 0.95}

    class Filled(filling, known):  # type: ignore[misc, valid-type]
        """Without DeepSpeed transformers' class lacks its base."""

        def __init__(self, config: dict[str, Any]) -> None:
            known.__init__(self, config)
            self._dtype, self.mismatches = None, []

    class Arguments:
        """What transformers reads of TrainingArguments there."""

        world_size, save_on_each_node, fp16_full_eval, bf16_full_eval = 3, False, False, False

        def get_warmup_steps(self, steps: int) -> int:
            return given["warmup_steps"]

    arguments = Arguments()
    for name, value in given.items():
        setattr(arguments, name, value)
    theirs = Filled(json.loads(json.dumps(config)))
    theirs.trainer_config_process(arguments)
    theirs.trainer_config_finalize(arguments, torch.nn.Linear(1, 1), 55)
    ours, origins = fill_auto(config, given)
    assert set(origins) == set(AUTO_FIELDS)
    assert theirs.config.pop("train_batch_size") == 24
    assert ours.pop("train_batch_size") == "auto"
    assert theirs.config["scheduler"]["params"].pop("total_num_steps") == 55
    assert ours["scheduler"]["params"].pop("total_num_steps") == "auto"
    assert ours == theirs.config
    assert convert_deepspeed(config, 3, given).arguments["global_batch"] == "24"


# ---- DeepSpeed


def test_batch_sizes_are_completed_as_deepspeed_does() -> None:
    def batch(workers: int = 0, **config: int) -> tuple[str | None, str, int]:
        made = convert_deepspeed(config, workers)
        return made.arguments.get("global_batch"), made.plan, made.workers

    three = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert batch(**three) == ("48", "micro=4", 4)
    assert batch(2, train_batch_size=48) == ("48", "", 2)
    assert batch(2, train_batch_size=48, gradient_accumulation_steps=3) == ("48", "micro=8", 2)
    assert batch(3, train_micro_batch_size_per_gpu=4) == ("12", "micro=4", 3)
    assert batch(1, train_micro_batch_size_per_gpu=4) == ("4", "", 1)
    assert batch(3, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2) == ("24", "micro=4", 3)
    assert batch(5)[0] is None
    wrong = convert_deepspeed(three, 5)
    assert wrong.settled["gradient_accumulation_steps"].verdict == REFUSED
    assert "48 is not" in wrong.settled["gradient_accumulation_steps"].text


@pytest.mark.parametrize(
    ("zero", "plan"),
    [
        ({"stage": 0}, ""),
        ({"stage": 1}, "shard=4 zero=1"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "shard=4 zero=2 offload=cpu"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "shard=4 zero=3 offload=cpu"),
        ({"stage": 3, "mics_shard_size": 2}, "shard=2 zero=3"),
        ({"stage": 2, "zero_quantized_gradients": True}, "shard=4 zero=2 codec=int8"),
    ],
)
def test_zero_becomes_shards(zero: dict[str, Any], plan: str) -> None:
    made = convert_deepspeed({"zero_optimization": zero}, 4)
    assert made.plan == plan
    refused = [name for name, verdict in verdicts(made).items() if verdict == REFUSED]
    assert refused == (["zero_optimization.offload_param.device"] if "offload_param" in zero else [])


def test_words_that_do_not_fit_together_are_refused_by_field() -> None:
    made = convert_deepspeed({"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}, 4)
    assert (made.plan, made.settled["zero_optimization.stage"].verdict) == ("shard=2 zero=3 tensor=2", USED)
    made = convert_deepspeed({"fp16": {"enabled": True}, "sequence_parallel_size": 2}, 4)
    assert (made.plan, made.settled["fp16.enabled"].verdict) == ("context=2 precision=fp16", USED)
    made = convert_deepspeed({"tensor_parallel": {"autotp_size": 3}}, 4)
    assert (made.plan, made.settled["tensor_parallel.autotp_size"].verdict) == ("", REFUSED)


def test_adam_decouples_weight_decay_unless_told_otherwise() -> None:
    def adam(kind: str, **params: Any) -> str:
        return convert_deepspeed({"optimizer": {"type": kind, "params": params}}).arguments["optimizer"]

    usual = "lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0"
    assert adam("Adam") == adam("AdamW") == adam("adamw") == f"lambda params: torch.optim.AdamW(params, {usual})"
    assert adam("Adam", adam_w_mode=False) == f"lambda params: torch.optim.Adam(params, {usual})"
    assert adam("AdamW", torch_adam=True, lr=0.1) == "lambda params: torch.optim.AdamW(params, lr=0.1)"
    assert adam("SGD", lr=0.1, momentum=0.9) == "lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)"
    assert "paceline.optim.LAMB(params, lr=0.1" in adam("Lamb", lr=0.1)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("optimizer.type", {"optimizer": {"type": "OneBitAdam"}}),
        ("optimizer.type", {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}),
        ("optimizer.type", {"optimizer": {"type": "Sgd"}}),
        ("optimizer.params.lr", {"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}),
        ("optimizer.params.momentum", {"optimizer": {"type": "Adam", "params": {"momentum": 0.9}}}),
        ("optimizer.params.bias_correction", {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}),
        ("scheduler.type", {"scheduler": {"type": "Warmup"}}),
        ("scheduler.params.cycle_momentum", {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}}),
        ("gradient_clipping", {"gradient_clipping": "high"}),
        ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}),
        ("fp16", {"fp16": "yes"}),
        ("amp.enabled", {"amp": {"enabled": True}}),
        ("compression_training.a.b", {"compression_training": {"a": {"b": 3}}}),
        ("zero_optimization.zenflow.topk_ratio", {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}),
        ("wandb.group", {"wandb": {"enabled": True, "group": "a"}}),
    ],
)
def test_wishes_that_cannot_be_met_are_refused_by_name(field: str, config: dict[str, Any]) -> None:
    made = convert_deepspeed(config, 2)
    assert made.settled[field].verdict == REFUSED
    assert "; " in made.settled[field].text  # why, and what to do


def test_fields_that_ask_for_nothing_have_no_effect() -> None:
    config = {
        "prescale_gradients": False,
        "gradient_allreduce_op": "mean",
        "fp16": {"enabled": False, "loss_scale": 0},
        "amp": {"enabled": False, "opt_level": "O1"},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "bits": 8}}},
        "zero_optimization": {"zero_quantized_weights": False, "offload_param": {"device": "none"}},
        "wandb": {"enabled": False, "project": "a"},
        "tensorboard": {},
    }
    made = convert_deepspeed(config, 2)
    assert {one.name for one in made.settled.values() if one.verdict != NO_EFFECT} == set()
    assert {name for name, _ in leaves(config)} <= set(made.settled)


def test_monitors_become_loggers() -> None:
    made = convert_deepspeed(
        {"wandb": {"enabled": True, "team": "a", "project": "b"}, "csv_monitor": {"enabled": True}}, 2
    )
    assert made.options == ["--log-to wandb:a/b", "--log-to csv"]
    assert {one.verdict for one in made.settled.values()} == {USED}


def test_unknown_names_get_the_nearest_one() -> None:
    made = convert_deepspeed(
        {"train_batchsize": 8, "stage": 2, "zero_optimization": {"overlap_com": True}, "qqq": 1}, 2
    )
    unknown = {one.name: one.text for one in made.settled.values() if one.verdict == UNKNOWN}
    assert unknown["train_batchsize"] == "did you mean train_batch_size?"
    assert unknown["stage"] == "did you mean zero_optimization.stage?"
    assert unknown["zero_optimization.overlap_com"] == "did you mean zero_optimization.overlap_comm?"
    assert unknown["qqq"] == "DeepSpeed does not document a field of this name"


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_schedules_have_the_rates_of_deepspeed(name: str, kind: str) -> None:
    words: dict[str, Any] = {"warmup_num_steps": 5, "warmup_type": kind}
    if name != "WarmupLR":
        words["total_num_steps"] = 14
    words |= {"warmup_min_ratio": 0.1} if name == "WarmupCosineLR" else {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02}
    optimizer = {"type": "SGD", "params": {"lr": 0.01}}
    made = convert_deepspeed({"optimizer": optimizer, "scheduler": {"type": name, "params": words}}, 2)
    factor = schedule_of(made)
    expected = reference_rates(Warmup(name, 0.01, **words), 20)
    assert [0.01 * factor(step) for step in range(20)] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) >= 5


@pytest.mark.parametrize("second", [0, 3, 4])
def test_one_cycle_has_the_rates_of_deepspeed(second: int) -> None:
    words = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_second_step_size": second}
    words |= {"decay_step_size": 2, "decay_lr_rate": 0.5}
    scheduler = {"type": "OneCycle", "params": {**words, "cycle_momentum": False}}
    made = convert_deepspeed({"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "scheduler": scheduler}, 2)
    factor = schedule_of(made)
    expected = reference_rates(OneCycle(**words), 15)
    assert [0.05 * factor(step) for step in range(15)] == pytest.approx(expected, rel=1e-12)


# ---- Accelerate and FSDP


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        ({"distributed_type": "NO"}, ""),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}, "precision=fp16"),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "pad_inner_dim": True}}, "precision=fp8"),
        ({"distributed_type": "FSDP"}, "shard=8 zero=3"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2}}, "shard=8 zero=2"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, ""),
        ({"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}}, "shard=4 zero=3"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
            "shard=8 zero=2",
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True},
                "dynamo_config": {"dynamo_backend": "INDUCTOR"},
            },
            "shard=8 zero=3 offload=cpu recompute=blocks compile",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            "shard=8 zero=3 offload=cpu",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {"megatron_lm_tp_degree": "2", "megatron_lm_pp_degree": 2},
            },
            "pipeline=2",
        ),
    ],
)
def test_kinds_of_distribution_become_plans(config: dict[str, Any], plan: str) -> None:
    made = convert_accelerate({**config, "num_processes": 8, "num_machines": 2})
    assert made.plan == plan
    assert str(Plan.parse(made.plan).validate(8)).startswith("data=")
    assert {name for name, _ in leaves(config)} <= set(made.settled)


def test_sections_of_another_kind_have_no_effect() -> None:
    made = convert_accelerate({"distributed_type": "MULTI_GPU", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}})
    assert (
        made.settled["fsdp_config.fsdp_version"].text
        == "distributed_type is MULTI_GPU, which does not read fsdp_config"
    )
    assert (made.plan, verdicts(made)["fsdp_config.fsdp_version"]) == ("", NO_EFFECT)


def test_a_deepspeed_file_of_an_accelerate_file_is_converted(tmp_path: Path) -> None:
    write(
        tmp_path,
        "ds.json",
        json.dumps({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "x": 1}),
    )
    config = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
    }
    made = convert_file("accelerate", write(tmp_path, "a.json", json.dumps(config)))
    assert made.plan == "shard=4 zero=2 micro=4"
    assert made.arguments["global_batch"] == "16"
    assert made.settled["ds.json: x"].verdict == UNKNOWN
    (tmp_path / "ds.json").unlink()
    lost = convert_file("accelerate", tmp_path / "a.json")
    assert lost.settled["deepspeed_config.deepspeed_config_file"].verdict == REFUSED


def test_several_machines_join_the_first() -> None:
    config = {"distributed_type": "MULTI_CPU", "num_processes": 6, "num_machines": 3, "main_process_ip": "10.0.0.1"}
    made = convert_accelerate({**config, "main_process_port": 29500, "use_cpu": True})
    text = text_of(made, "a.yaml")
    assert "paceline run --workers 2 --listen 10.0.0.1:29500 train.py" in text
    assert "--join 10.0.0.1:29500" in text
    assert "CUDA_VISIBLE_DEVICES" in text


def test_the_section_of_fsdp_alone_is_read(tmp_path: Path) -> None:
    text = json.dumps({"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["Block"], "xla": False})
    made = convert_file("fsdp", write(tmp_path, "fsdp.json", text), 4)
    assert made.plan == "shard=4 zero=2"
    assert made.settled["fsdp_config.transformer_layer_cls_to_wrap"].verdict == NO_EFFECT


def test_every_field_of_deepspeed_that_accelerate_writes_is_one() -> None:
    assert set(DEEPSPEED_FIELDS.values()) <= set(DEEPSPEED.used)


# ---- files

# Each list holds the one before ten times.
BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{\n "a": 1, // rows\n}', "a.json, line 2: the file has a comment (//), and JSON has none"),
        (
            "a.json",
            '{\n "train_batch_size": BATCH\n}',
            "line 2, column 22: expecting value; write a value in place of BATCH",
        ),
        ("a.json", '{"a": True}', "line 1, column 7: expecting value; write true instead of True"),
        ("a.json", '{\n "a": 1,\n}', "remove the comma before it"),
        ("a.json", '{"a": 1,\n "b": 2,\n "a": 3}', "a.json, line 3: the field a occurs twice in one object"),
        ("a.json", "[1]", "a.json holds a list, not an object with named fields"),
        ("a.json", "[" * 100_000, "a.json is nested too deeply"),
        ("a.json", "", "line 1, column 1: expecting value"),
        ("a.yaml", "a: 1\nb: [\n", "a.yaml, line 3, column 1: expected the node content"),
        ("a.yaml", "a: 1\na: 2\n", "a.yaml, line 2, column 1: 'a' occurs twice, with different values"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("a.yaml", "just text\n", "a.yaml holds a text"),
        ("a.yaml", "a0: &a0 [x, x]\n" + BOMB, "a.yaml has more than 100,000 values"),
        ("a.yaml", "a: &a\n  b: *a\n", "a.yaml, line 1, column 4: found unconstructable recursive node"),
        ("a.yaml", "a: &a [1]\nb: [*a\n", "line 3, column 1"),
    ],
)
def test_broken_files_name_the_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        convert_file("deepspeed", write(tmp_path, name, text))
    assert message in str(caught.value)


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    accelerate = write(tmp_path, "a.yaml", "distributed_type: NO\nnum_processes: 1\n")
    with pytest.raises(UsageError, match="use paceline from accelerate"):
        convert_file("deepspeed", accelerate)
    script = write(tmp_path, "b.yaml", "learning_rate: 1e-4\nreport_to: none\n")
    with pytest.raises(UsageError, match=r"no field of Accelerate's configuration; .* paceline.hf"):
        convert_file("accelerate", script)
    with pytest.raises(UsageError, match="--set 'rate=3' is not NAME=VALUE"):
        read_settings(["rate=3"])
    with pytest.raises(UsageError, match="warmup_steps needs a whole number"):
        read_settings(["warmup_steps=few"])


def test_yaml_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"needs PyYAML, which is not installed; pip install 'paceline\[configs\]'"):
        convert_file("accelerate", write(tmp_path, "a.yaml", "distributed_type: NO\n"))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 100)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "nvme", "AdamW", "x"]),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


def nested(table: FieldTable, names: list[str], values: list[Any]) -> dict[str, Any]:
    """A configuration with some fields of a table, of any value."""
    config: dict[str, Any] = {}
    for name, value in zip(names, values, strict=False):
        section = config
        *heads, last = name.split(".")
        for head in heads:
            if not isinstance(section.setdefault(head, {}), dict):
                section[head] = {}
            section = section[head]
        section[last] = value
    return config


@pytest.mark.parametrize("tool", ["DeepSpeed", "Accelerate"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_value_of_any_field_is_accounted_for(tool: str, data: Any) -> None:
    table = {"DeepSpeed": DEEPSPEED, "Accelerate": ACCELERATE}[tool]
    names = data.draw(st.lists(st.sampled_from([*table.used, *table.names(), "unknown"]), max_size=12, unique=True))
    values = data.draw(st.lists(VALUES, min_size=len(names), max_size=len(names)))
    config = nested(table, names, values)
    if table is ACCELERATE:
        kind = data.draw(st.sampled_from(["FSDP", "DEEPSPEED", "MEGATRON_LM", "NO"]))
        made = convert_accelerate({"distributed_type": kind, **config}, data.draw(st.integers(0, 9)))
    else:
        made = convert_deepspeed(config, data.draw(st.integers(0, 9)))
    Plan.parse(made.plan).validate(made.workers)
    assert {name for name, _ in leaves(config)} <= set(made.settled)
    assert set(verdicts(made).values()) <= {USED, NO_EFFECT, REFUSED, UNKNOWN}
    assert all(one.text for one in made.settled.values())
    compile(script_of(made), "train.py", "exec")
    assert json.loads(json_of(made))["plan"] == made.plan
    assert text_of(made, "a.json")


# ---- the command, and training


def test_the_command_prints_the_plan_without_torch(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "steps_per_print": 10})
    path = write(tmp_path, "ds.json", text)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    write(hidden, "torch.py", "raise SystemExit('paceline from imports torch')")
    done = paceline("from", "deepspeed", path, "--workers", "4", cwd=tmp_path, PYTHONPATH=str(hidden))
    assert "\nplan\n    shard=4 zero=2\n" in done.stdout
    assert "paceline run --workers 4 --plan 'shard=4 zero=2' train.py" in done.stdout
    write(tmp_path, "ds.json", '{"train_batch_size": 8, "stage": 2}')
    refused = paceline("from", "deepspeed", path, "--json", cwd=tmp_path, code=1, PYTHONPATH=str(hidden))
    assert [one["verdict"] for one in json.loads(refused.stdout)["fields"]] == ["used", "unknown"]
    write(tmp_path, "ds.json", "{")
    broken = paceline("from", "deepspeed", path, cwd=tmp_path, code=2, PYTHONPATH=str(hidden))
    assert "line 1, column 2" in broken.stderr


def test_pages_print_what_the_command_prints(tmp_path: Path) -> None:
    page = (config_pages.PAGES / "deepspeed.md").read_text()
    config = page.split("```json\n")[1].split("```")[0]
    printed = text_of(convert_file("deepspeed", write(tmp_path, "ds.json", config), 8), "ds.json")
    assert page.split("before the list of fields,\n\n```\n")[1].split("```")[0].strip() in printed
    page = (config_pages.PAGES / "accelerate-fsdp-configs.md").read_text()
    config = page.split("```yaml\n")[1].split("```")[0]
    printed = text_of(convert_file("accelerate", write(tmp_path, "a.yaml", config)), "a.yaml")
    assert page.split("list of fields,\n\n```\n")[1].split("```")[0].strip() in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_converted_configuration_trains_as_it_describes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = (
        partial(convert_accelerate, case.config) if case.accelerate else partial(convert_deepspeed, case.config, 2)
    )()
    assert [one for one in made.settled.values() if one.verdict in (REFUSED, UNKNOWN)] == []
    assert made.workers == 2
    assert made.plan == case.plan
    script = write(tmp_path, "train.py", script_for(made, case))
    paceline("run", "--workers", "2", "--plan", made.plan, script, cwd=tmp_path)
    weights, expected = load_file(tmp_path / "out.safetensors"), reference_weights(case)
    assert set(weights) == set(expected)
    for key, value in expected.items():
        assert (weights[key] - value).norm() <= 1e-9 * value.norm(), key


def test_no_case_is_trained_by_its_first_weights() -> None:
    """The comparison of trained weights can fail: each case changes them by more than its tolerance."""
    for name, case in CASES.items():
        first = reference_weights(dataclasses.replace(case, steps=0))
        last = reference_weights(case)
        assert all((last[key] - first[key]).norm() > 1e-4 * first[key].norm() for key in first), name


def test_a_conversion_raises_errors_of_paceline_alone() -> None:
    with pytest.raises(PacelineError):
        convert_file("deepspeed", Path(__file__))
