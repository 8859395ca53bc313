"""Every field of a DeepSpeed configuration: what becomes of it, why it has no effect, or why it is refused."""

from __future__ import annotations

from paceline.integrations.configs.conversion import FieldRefusal, FieldTable


def within(section: str, names: str, text: str) -> dict[str, str]:
    """The same text for several fields of a section."""
    return {f"{section}.{name}" if section else name: text for name in names.split()}


def refused_within(section: str, names: str, why: str, cure: str, *harmless: object) -> dict[str, FieldRefusal]:
    """The same refusal for several fields of a section."""
    return {f"{section}.{name}" if section else name: FieldRefusal(why, cure, harmless) for name in names.split()}


_ZERO = "zero_optimization"
_BUCKETS = "Paceline chooses the size of its buckets and how far to prefetch"
_ADAM = "an argument of the optimizer"
_LR = "the schedule"

USED_FIELDS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "plan word micro; times gradient_accumulation_steps and workers: global_batch",
    "gradient_accumulation_steps": "times train_micro_batch_size_per_gpu and workers: global_batch",
    "gradient_clipping": "clip_norm",
    "optimizer.type": "the optimizer",
    **within("optimizer.params", "lr betas eps weight_decay adam_w_mode torch_adam amsgrad", _ADAM),
    **within("optimizer.params", "momentum nesterov dampening maximize alpha centered", _ADAM),
    **within("optimizer.params", "rho lr_decay initial_accumulator_value lambd t0 etas step_sizes", _ADAM),
    **within(
        "optimizer.params", "momentum_decay decoupled_weight_decay differentiable foreach fused capturable", _ADAM
    ),
    "scheduler.type": "the schedule",
    **within("scheduler.params", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps", _LR),
    **within("scheduler.params", "warmup_min_ratio cos_min_ratio cycle_min_lr cycle_max_lr", _LR),
    **within("scheduler.params", "cycle_first_step_size cycle_second_step_size decay_step_size decay_lr_rate", _LR),
    **within("scheduler.params", "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate", _LR),
    "scheduler.params.lr_range_test_staircase": _LR,
    "fp16.enabled": "plan word precision=fp16",
    "bf16.enabled": "plan word precision=bf16",
    "bfloat16.enabled": "plan word precision=bf16 (an old name of bf16)",
    "torch_autocast.enabled": "plan word precision, with torch_autocast.dtype",
    "torch_autocast.dtype": "plan word precision",
    f"{_ZERO}.stage": "plan words shard and zero; stage 0: none",
    f"{_ZERO}.mics_shard_size": "plan word shard",
    f"{_ZERO}.offload_optimizer.device": "cpu: plan word offload=cpu",
    f"{_ZERO}.offload_param.device": "cpu: plan word offload=cpu",
    f"{_ZERO}.cpu_offload": "plan word offload=cpu (an old name of offload_optimizer)",
    f"{_ZERO}.cpu_offload_param": "plan word offload=cpu (an old name of offload_param)",
    f"{_ZERO}.zero_quantized_gradients": "plan word codec=int8, between hosts",
    "communication_data_type": "plan word codec, between hosts",
    "sequence_parallel_size": "plan word context",
    "tensor_parallel.autotp_size": "plan word tensor",
    "tensor_parallel.tp_size": "plan word tensor",
    "tensor_parallel.tensor_parallel.tp_size": "plan word tensor",
    "tensor_parallel.tp.tp_size": "plan word tensor",
    "pipeline.stages": "plan word pipeline",
    "pipeline.activation_checkpoint_interval": "above 0: plan word recompute=blocks",
    **within(
        "activation_checkpointing",
        "partition_activations contiguous_memory_optimization number_checkpoints",
        "plan word recompute=blocks",
    ),
    "compile.deepcompile": "plan word compile",
    "compile.enabled": "plan word compile",
    "tensorboard.enabled": "paceline run --tensorboard",
    **within("wandb", "enabled team project", "paceline run --log-to wandb"),
    **within("comet", "enabled workspace project", "paceline run --log-to comet"),
    "csv_monitor.enabled": "paceline run --log-to csv",
    "elasticity.enabled": "any run may grow and shrink: paceline run --join, --min-workers",
    "elasticity.min_gpus": "paceline run --min-workers",
}

_UNREAD = "DeepSpeed does not read it"
NO_EFFECT_FIELDS = {
    **within("", "steps_per_print", "Paceline shows its progress by time"),
    **within("", "wall_clock_breakdown memory_breakdown", "the report has times and memory of every run"),
    **within("", "dump_state log_level", "it only changes what DeepSpeed logs"),
    **within(
        "",
        "prescale_gradients gradient_predivide_factor",
        "gradients are summed, and divided once by the number of rows: nothing to scale before",
    ),
    "disable_allgather": "it changes how weights travel, not the result",
    "sparse_gradients": "sparse gradients of nn.Embedding(sparse=True) travel as they are",
    "zero_allow_untested_optimizer": "any torch optimizer works with shard=; one that is not elementwise gets whole"
    " parameters",
    "zero_force_ds_cpu_optimizer": "with offload=cpu torch's own optimizer runs on the CPU",
    "graph_harvesting": "Paceline records no CUDA graphs",
    "use_data_before_expert_parallelism": "the order of the axes is Paceline's: data, shard, expert, pipeline, ...",
    "seq_parallel_communication_data_type": "activations travel in the dtype of the forward",
    "optimizer.legacy_fusion": "torch fuses the optimizer where it can",
    **within(
        "optimizer.params",
        "comm_backend_name cuda_aware",
        "Paceline has its own transport",
    ),
    "optimizer.params.fp32_optimizer_states": "the state of the optimizer has the dtype of the weights",
    **within(
        "fp16",
        "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
        "the loss scale is Paceline's own, and a power of two: it changes no result unless values overflow",
    ),
    "fp16.auto_cast": "inputs are cast where an operation needs it",
    "bf16.immediate_grad_update": "it changes when gradients are added up, not their sum",
    **within("bf16", "check_grad_overflow check_overflow", "a gradient that is not finite always ends the run"),
    **within(
        _ZERO,
        "allgather_partitions allgather_bucket_size reduce_scatter reduce_bucket_size contiguous_gradients overlap_comm"
        " round_robin_gradients use_multi_rank_bucket_allreduce sub_group_size stage3_prefetch_bucket_size"
        " prefetch_bucket_size stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance"
        " max_reuse_distance stage3_param_persistence_threshold param_persistence_threshold"
        " stage3_model_persistence_threshold model_persistence_threshold stage3_module_granularity_threshold"
        " module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params"
        " stage3_allgather_sequential allgather_sequential",
        _BUCKETS,
    ),
    **within(
        _ZERO,
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save"
        " stage3_gather_fp16_weights_on_model_save",
        "trainer.export() and paceline export write whole weights under any plan",
    ),
    **within(
        _ZERO,
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        "any checkpoint loads under any plan and on any number of workers",
    ),
    **within(_ZERO, "cpu_offload_use_pin_memory", "Paceline pins memory on its own"),
    f"{_ZERO}.ignore_unused_parameters": "parameters without a gradient are named once and left alone",
    f"{_ZERO}.legacy_stage1": "it selects another implementation of the same arithmetic",
    f"{_ZERO}.memory_efficient_linear": "it selects another implementation of the same arithmetic",
    f"{_ZERO}.override_module_apply": "weights are made by the model's own code",
    **within(_ZERO, "log_trace_cache_warnings enable_sanity_checks", "it only checks DeepSpeed's own hooks"),
    f"{_ZERO}.save_muon_momentum_buffer_in_memory": "it only concerns DeepSpeed's Muon",
    f"{_ZERO}.mics_hierarchical_params_gather": "it changes how weights travel, not the result",
    **within(f"{_ZERO}.leaf_module", "classes names name_suffixes", "Paceline finds the blocks to gather by itself"),
    **within(
        f"{_ZERO}.offload_optimizer",
        "pin_memory buffer_count pipeline_read pipeline_write fast_init ratio cpuadam_cores_perc nvme_path",
        "offload=cpu moves the whole state and chooses its own buffers",
    ),
    **within(
        f"{_ZERO}.offload_param",
        "pin_memory buffer_count buffer_size max_in_cpu nvme_path",
        "offload=cpu moves all shards and chooses its own buffers",
    ),
    **within(
        "activation_checkpointing",
        "synchronize_checkpoint_boundary profile",
        "it only measures and orders DeepSpeed's own checkpointing",
    ),
    **within(
        "pipeline", "partition seed_layers pipe_partitioned grad_partitioned", "Paceline cuts blocks by their cost"
    ),
    **within(
        "tensor_parallel",
        "dtype tp_overlap_comm preset_model tp_grain_size keep_module_on_host replace_with_kernel_inject kernel_inject",
        "Paceline finds the layers of the model that can be cut; weights keep their dtype",
    ),
    **within(
        "compile",
        "free_activation free_activation_threshold offload_activation offload_activation_pin_memory offload_opt_states"
        " double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce"
        " sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors disable",
        "torch.compile decides by itself",
    ),
    **within(
        "flops_profiler",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        "the report has the model's operations per second; see paceline profile for single operations",
    ),
    **within(
        "comms_logger", "enabled verbose prof_all prof_ops debug", "the report has bytes and seconds of every run"
    ),
    **within("tensorboard", "output_path job_name", "files go to the run folder"),
    **within("csv_monitor", "output_path job_name", "tables go to the run folder"),
    "comet.samples_log_interval": "loggers get every record of the journal",
    **within(
        "aio",
        "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
        "it only concerns offloading to NVMe",
    ),
    **within(
        "checkpoint",
        "tag_validation load_universal use_node_local_storage parallel_write.pipeline_stage checkpoint_serialization"
        " writer.type writer.io_buffer_size writer.io_buffer_double writer.io_multiplier writer.show_statistics"
        " writer.data_parallel writer.decoupled writer",
        "checkpoints are Paceline's own: all workers write them together, and any plan reads them",
    ),
    **within(
        "nebula",
        "enabled enable_nebula_load load_path nebula_load_path persistent_storage_path persistent_time_interval"
        " num_of_version_in_retention",
        "use paceline run --checkpoints, --save-every and --keep",
    ),
    **within(
        "autotuning",
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric_path tuner_type"
        " tuner_early_stopping tuner_num_trials max_train_batch_size min_train_batch_size"
        " max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size"
        " metric",
        "it only concerns DeepSpeed's tuning runs; paceline explain predicts memory and time of a plan",
    ),
    **within("elasticity", "min_time version ignore_non_elastic_batch_info", "it only concerns DeepSpeed's scheduler"),
    **within("elasticity", "num_gpus_per_node model_parallel_size max_gpus", "any number of workers may join"),
    "vocabulary_size": "DeepSpeed only warns about it",
    "ds_pipe_replicated": "parameters that stages share are found",
    "cuda_visible_devices": f"{_UNREAD}; set the environment variable CUDA_VISIBLE_DEVICES",
    f"{_ZERO}.zero_allow_untested_optimizer": f"{_UNREAD} in this section",
}

_HALF_STATE = "weights and optimizer state in half precision would change results"
_HALF_CURE = "leave it out; to train a model that is in bfloat16, build it so: Net().to(torch.bfloat16)"
REFUSED_FIELDS = {
    "gradient_allreduce_op": FieldRefusal(
        "gradients are means over all rows, not sums over workers",
        "multiply the loss by the number of workers",
        ("mean",),
    ),
    "managed_gradient_accumulation": FieldRefusal(
        "the global batch decides when the optimizer steps", "leave it out", (True,)
    ),
    "dataloader_drop_last": FieldRefusal(
        "every row counts: an epoch's last batch may be smaller", "shorten the dataset: torch.utils.data.Subset"
    ),
    "data_types.grad_accum_dtype": FieldRefusal(
        "gradients are added up in the dtype of the weights", "leave it out", ("fp32",)
    ),
    **refused_within(
        "data_types",
        "param_dtype buffer_dtype",
        "the dtype of the weights is the model's own",
        "build the model in it: Net().to(torch.bfloat16)",
        "fp32",
    ),
    **refused_within("bf16", "bf16_master_weights_and_grads bf16_optimizer_states", _HALF_STATE, _HALF_CURE),
    "fp16.fp16_master_weights_and_grads": FieldRefusal(_HALF_STATE, _HALF_CURE),
    "torch_autocast.lower_precision_safe_modules": FieldRefusal(
        "torch's autocast decides by operation, not by module", "leave it out"
    ),
    "optimizer.params.bias_correction": FieldRefusal(
        "torch's optimizers always correct the bias of their means",
        "leave it out, and expect other first steps",
        (True,),
    ),
    **refused_within(
        "optimizer.params",
        "max_coeff min_coeff",
        "the ratio of paceline.optim.LAMB has no bounds",
        "leave it out",
    ),
    **refused_within(
        "optimizer.params",
        "freeze_step coeff_beta factor_max factor_min factor_threshold var_freeze_step var_update_scaler"
        " local_step_scaler local_step_clipper cuda_graph eps_inside_sqrt exp_avg_mask",
        "it belongs to an optimizer that compresses its own traffic",
        "use AdamW with the plan word codec=sign for slow links",
        0,
    ),
    **refused_within(
        "optimizer.params",
        "muon_lr adam_lr ns_method",
        "Muon needs the parameters in two groups, which the file cannot name",
        "write optimizer= yourself with torch.optim.Muon and torch.optim.AdamW",
    ),
    "optimizer.params.max_grad_norm": FieldRefusal("DeepSpeed refuses it, too", "use gradient_clipping", (0, 0.0)),
    **refused_within(
        "scheduler.params",
        "cycle_first_stair_count cycle_second_stair_count",
        "the schedule has no stairs",
        "leave it out, or write schedule= yourself",
        0,
    ),
    **refused_within(
        "scheduler.params",
        "cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
        "schedule= is a factor of the learning rate and leaves momentum alone",
        "set cycle_momentum to false",
    ),
    "scheduler.params.last_batch_iteration": FieldRefusal(
        "a resumed run continues its schedule by itself", "leave it out", (-1,)
    ),
    f"{_ZERO}.zero_hpz_partition_size": FieldRefusal(
        "weights have one partition; a second copy within each host is not built", "leave it out", (0, 1)
    ),
    f"{_ZERO}.zero_quantized_weights": FieldRefusal("weights travel as they are", "leave it out"),
    f"{_ZERO}.zero_quantized_nontrainable_weights": FieldRefusal("weights travel as they are", "leave it out"),
    f"{_ZERO}.zeropp_loco_param": FieldRefusal("the codec's error feedback has no options", "leave it out"),
    f"{_ZERO}.offload_optimizer.super_offload": FieldRefusal("only offload=cpu is built", "leave it out"),
    **refused_within(
        "tensor_parallel",
        "partition_config injection_policy_tuple mpu tp_group",
        "layers are named in the script",
        "use the Trainer's argument tensor={name: how}, where Paceline does not find the layers by itself",
    ),
    "activation_checkpointing.cpu_checkpointing": FieldRefusal(
        "activations are not moved to the CPU", "the plan has recompute=blocks instead"
    ),
    "compile.passes": FieldRefusal("torch.compile does not have these passes", "use the plan words tensor and context"),
    "compile.backend": FieldRefusal(
        "the plan word compile uses torch's default backend", "leave it out", ("inductor",)
    ),
    "compile.kwargs": FieldRefusal("the plan word compile has no options", "leave it out"),
    **refused_within(
        "elasticity",
        "max_train_batch_size micro_batch_sizes prefer_larger_batch",
        "DeepSpeed computes the batch from the number of GPUs; Paceline keeps the global batch on any number",
        "choose global_batch= yourself",
    ),
    "mesh_param": FieldRefusal("the mesh is the plan's", "use the plan words shard and context"),
    "data_parallel_size": FieldRefusal("the number of replicas follows from the number of workers", "leave it out"),
    "autotuning.model_info": FieldRefusal("paceline explain measures the model itself", "leave it out"),
    "autotuning.model_info_path": FieldRefusal("paceline explain measures the model itself", "leave it out"),
}

_ASK = "write it in the model or the loss"
# Sections whose fields have names of the user's own, or that are refused as a whole. A text is why one has no effect.
FREE_SECTIONS: dict[str, FieldRefusal | str] = {
    "amp": FieldRefusal("NVIDIA's apex is not used", "use the plan word precision=fp16 or precision=bf16"),
    "compression_training": FieldRefusal(
        "quantization and pruning while training are not built", "change the model before training, with torchao"
    ),
    "quantize_training": FieldRefusal(
        "quantization while training (MoQ) is not built", "change the model before training, with torchao"
    ),
    "data_efficiency": FieldRefusal(
        "curriculum sampling and dropping of tokens are not built",
        "use order= of trainer.steps(), and the model's code",
    ),
    "curriculum_learning": FieldRefusal(
        "a curriculum is not built", "use order= of trainer.steps(), and cut sequences in collate="
    ),
    "progressive_layer_drop": FieldRefusal("dropping layers is not built", _ASK),
    "eigenvalue": FieldRefusal("eigenvalues only steer MoQ, which is not built", "leave it out"),
    "sparse_attention": FieldRefusal(
        "attention is the model's own", "use torch.nn.attention.flex_attention in the model"
    ),
    "expert_parallel": FieldRefusal("its layers of experts are DeepSpeed's own", "use the plan word expert=N"),
    "moe": FieldRefusal("its layers of experts are DeepSpeed's own", "use the plan word expert=N"),
    "hybrid_engine": FieldRefusal("generation is the model's own", "call model.generate() under torch.no_grad()"),
    f"{_ZERO}.zenflow": FieldRefusal(
        "updates that lag behind are not built for offload", "leave it out: offload=cpu waits for each update"
    ),
    "wandb.group": FieldRefusal("the settings of Weights & Biases apply", "set WANDB_RUN_GROUP"),
    **refused_within(
        "comet",
        "api_key experiment_name experiment_key online mode",
        "Comet's own settings apply",
        "set COMET_API_KEY, COMET_START_EXPERIMENT_NAME, COMET_EXPERIMENT_KEY, COMET_START_ONLINE or COMET_START_MODE",
    ),
    "autotuning.arg_mappings": "it only concerns DeepSpeed's tuning runs",
    "datastates_ckpt": FieldRefusal("checkpoints are Paceline's own", "leave it out"),
    "weight_quantization": FieldRefusal("it only concerns inference", "leave it out"),
    "msamp": FieldRefusal("weights and gradients in 8 bits (MS-AMP) are not built", "use the plan word precision=fp8"),
}

DEEPSPEED = FieldTable("DeepSpeed", USED_FIELDS, NO_EFFECT_FIELDS, REFUSED_FIELDS, FREE_SECTIONS)
