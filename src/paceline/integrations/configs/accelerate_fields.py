"""Every field of an Accelerate configuration, FSDP's and TRL's included: used, without effect, or refused."""

from __future__ import annotations

from paceline.integrations.configs.conversion import FieldRefusal, FieldTable
from paceline.integrations.configs.deepspeed_fields import refused_within, within

_FSDP = "fsdp_config.fsdp_"
_MEGATRON = "megatron_lm_config.megatron_lm_"


def _each(head: str, names: str, text: str) -> dict[str, str]:
    return {f"{head}{name}": text for name in names.split()}


USED_FIELDS = {
    "distributed_type": "how the work is spread: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, MEGATRON_LM, TP",
    "num_processes": "paceline run --workers",
    "num_machines": "workers per machine, and how the others join",
    **within("", "main_process_ip main_process_port", "paceline run --listen, and --join on other machines"),
    "gpu_ids": "the environment variable CUDA_VISIBLE_DEVICES",
    "use_cpu": "the environment variable CUDA_VISIBLE_DEVICES, empty",
    "mixed_precision": "plan word precision",
    "fp16": "plan word precision=fp16 (an old name of mixed_precision)",
    "downcast_bf16": "only TPUs use it",
    "dynamo_backend": "plan word compile (an old place of dynamo_config)",
    "dynamo_config.dynamo_backend": "plan word compile",
    f"{_FSDP}version": "which names the other fields have",
    f"{_FSDP}sharding_strategy": "plan words shard and zero",
    f"{_FSDP}reshard_after_forward": "plan words shard and zero",
    f"{_FSDP}offload_params": "plan word offload=cpu",
    f"{_FSDP}cpu_offload": "plan word offload=cpu",
    f"{_FSDP}activation_checkpointing": "plan word recompute=blocks",
    "deepspeed_config.deepspeed_config_file": "the file is converted, too",
    "deepspeed_config.zero_stage": "plan words shard and zero",
    "deepspeed_config.offload_optimizer_device": "cpu: plan word offload=cpu",
    "deepspeed_config.offload_param_device": "cpu: plan word offload=cpu",
    "deepspeed_config.gradient_accumulation_steps": "times the batch size of the DataLoader and workers: global_batch",
    "deepspeed_config.gradient_clipping": "clip_norm",
    "deepspeed_config.zero3_init_flag": "pass the model as a function: weights are then built in parts",
    "parallelism_config.parallelism_config_dp_replicate_size": "plan word data, which follows from the workers",
    "parallelism_config.parallelism_config_dp_shard_size": "plan word shard",
    "parallelism_config.parallelism_config_tp_size": "plan word tensor",
    "parallelism_config.parallelism_config_cp_size": "plan word context",
    "parallelism_config.parallelism_config_sp_size": "plan word context",
    f"{_MEGATRON}tp_degree": "plan word tensor",
    f"{_MEGATRON}pp_degree": "plan word pipeline",
    f"{_MEGATRON}context_parallel_size": "plan word context",
    f"{_MEGATRON}expert_model_parallel_size": "plan word expert",
    f"{_MEGATRON}num_micro_batches": "plan word micro",
    f"{_MEGATRON}gradient_clipping": "clip_norm",
    f"{_MEGATRON}recompute_activations": "plan word recompute=blocks",
    f"{_MEGATRON}recompute_granularity": "plan word recompute=blocks",
    f"{_MEGATRON}use_distributed_optimizer": "plan words shard and zero=1",
    "mpirun_config.mpirun_hostfile": "paceline launch mpi --hostfile",
}

_BLOCKS = "Paceline finds the blocks to gather by itself"
_JOINS = "workers find each other, over any network"
NO_EFFECT_FIELDS = {
    "compute_environment": "scripts run on the machines that you start them on",
    "machine_rank": "scripts name no machine: every other machine joins the first",
    **within("", "rdzv_backend rdzv_conf rdzv_endpoint rdzv_id same_network", _JOINS),
    **within("", "max_restarts monitor_interval", "use paceline run --max-restarts and --hang-timeout"),
    "main_training_function": "only TPUs and notebooks call it; paceline.launch(function) does so elsewhere",
    "debug": "a worker in another collective than the others is always reported",
    "enable_cpu_affinity": "the system places processes; use numactl where it matters",
    "num_cpu_threads_per_process": "set OMP_NUM_THREADS",
    **within(
        "", "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env", "only TPUs use it"
    ),
    **_each(
        _FSDP,
        "auto_wrap_policy transformer_layer_cls_to_wrap transformer_cls_names_to_wrap min_num_params",
        _BLOCKS,
    ),
    **_each(
        _FSDP,
        "backward_prefetch backward_prefetch_policy forward_prefetch limit_all_gathers",
        "Paceline chooses how far to prefetch",
    ),
    **_each(_FSDP, "state_dict_type", "any checkpoint loads under any plan; trainer.export() writes whole weights"),
    f"{_FSDP}use_orig_params": "parameters keep their own names and shapes",
    **_each(
        _FSDP,
        "sync_module_states cpu_ram_efficient_loading",
        "all workers take worker 0's weights, or build their parts: model=Net",
    ),
    **_each(_FSDP, "xla xla_fsdp_v2 xla_fsdp_grad_ckpt", "only TPUs use it"),
    "deepspeed_config.zero3_save_16bit_model": "trainer.export() writes whole weights under any plan",
    **within(
        "deepspeed_config",
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
        "use paceline launch ssh --hosts or --hostfile",
    ),
    "deepspeed_config.offload_optimizer_nvme_path": "it only concerns offloading to NVMe",
    "deepspeed_config.offload_param_nvme_path": "it only concerns offloading to NVMe",
    "deepspeed_config.seq_parallel_communication_data_type": "activations travel in the dtype of the forward",
    "parallelism_config.parallelism_config_cp_backend": "context= splits sequences in its own way",
    "parallelism_config.parallelism_config_cp_comm_strategy": "context= splits sequences in its own way",
    **{
        f"parallelism_config.parallelism_config_sp_{name}": "context= splits sequences of any length in its own way"
        for name in ("backend", "seq_length", "seq_length_is_variable")
    },
    "parallelism_config.parallelism_config_sp_attn_implementation": "attention is the model's own",
    f"{_MEGATRON}sequence_parallelism": "tensor= cuts what can be cut; this changes memory, not results",
    **_each(
        _MEGATRON,
        "recompute_method recompute_num_layers",
        "recompute=blocks recomputes every block",
    ),
    **_each(
        _MEGATRON,
        "use_custom_fsdp overlap_cpu_optimizer_d2h_h2d decoder_last_pipeline_num_layers",
        "the plan decides which layers are divided, and where",
    ),
    **_each(_MEGATRON, "no_load_optim no_save_optim", "checkpoints hold all that a resumed run needs"),
    **_each(
        _MEGATRON,
        "attention_backend attention_dropout hidden_dropout attention_softmax_in_fp32 use_rotary_position_embeddings",
        "the model's own code decides it",
    ),
    **within("mpirun_config", "mpirun_ccl", "Paceline has its own transport"),
    "dynamo_config.dynamo_use_regional_compilation": "it changes how long torch.compile takes, not the result",
}

_TPU = ("Paceline runs on CPUs and NVIDIA GPUs", "leave it out")
REFUSED_FIELDS = {
    **refused_within("dynamo_config", "dynamo_mode", "the plan word compile has no options", "leave it out", "default"),
    **refused_within(
        "dynamo_config",
        "dynamo_use_fullgraph dynamo_use_dynamic",
        "the plan word compile has no options",
        "leave it out",
    ),
    f"{_FSDP}activation_checkpointing_offload": FieldRefusal(
        "activations are not moved to the CPU", "use the plan word recompute=blocks"
    ),
    f"{_FSDP}ignored_modules": FieldRefusal(
        "shard= cuts every parameter", "leave it out: a module that is called whole works as well"
    ),
    f"{_FSDP}mixed_precision_policy": FieldRefusal("the plan has one precision", "use the plan word precision"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": FieldRefusal(
        "layers of experts are found by their structure", "leave it out, and use the plan word expert=N"
    ),
    f"{_MEGATRON}expert_tensor_parallel_size": FieldRefusal(
        "tensor=N divides experts as it divides other layers", "leave it out", (1, "1")
    ),
    f"{_MEGATRON}optimizer_cpu_offload": FieldRefusal(
        "offload=cpu needs shards", "add the plan words shard=N offload=cpu"
    ),
    f"{_MEGATRON}use_precision_aware_optimizer": FieldRefusal(
        "the state of the optimizer has the dtype of the weights", "leave it out"
    ),
    **refused_within(
        "megatron_lm_config",
        "megatron_lm_eod_mask_loss megatron_lm_calculate_per_token_loss",
        "the loss is the script's own",
        "return (sum, count) over tokens from the loss",
    ),
    **refused_within(
        "",
        "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version"
        " py_version sagemaker_inputs_file sagemaker_metrics_file",
        "SageMaker starts no runs of Paceline",
        "start paceline run or paceline launch on its machines",
    ),
}

FREE_SECTIONS: dict[str, FieldRefusal | str] = {
    "fp8_config": "precision=fp8 computes as the backend AO does, with a scale for each tensor, and pads sizes",
    "additional_args": FieldRefusal("SageMaker starts no runs of Paceline", "start paceline run on its machines"),
    f"{_FSDP}xla_fsdp_settings": FieldRefusal(*_TPU),
}

ACCELERATE = FieldTable("Accelerate", USED_FIELDS, NO_EFFECT_FIELDS, REFUSED_FIELDS, FREE_SECTIONS)
