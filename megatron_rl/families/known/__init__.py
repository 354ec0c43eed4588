"""One file is one family; ``FAMILIES`` of `megatron_rl.registry` finds it by its name."""
