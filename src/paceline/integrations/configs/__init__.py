"""`paceline from`: the plan and the Trainer arguments for a configuration file of DeepSpeed, Accelerate or FSDP."""
