"""One file is one family; `megatron_rl.families.discovery` finds it by its name."""
