"""Everything that can be found wrong before a model is built, all of it reported together.

The configuration's own rules are `megatron_rl.config.validate`'s; here are the files, names and ports it
mentions. No process group is needed: `--check` calls this, and rank 0 of every launch.
"""

from megatron_rl.config import RLConfig
from megatron_rl.errors import Problem
from megatron_rl.preflight import critic, extensions, inputs, machine, starts, teacher


def preflight(config: RLConfig) -> list[Problem]:
    """Every problem there is."""
    config, wrong = extensions.extension_problems(config)
    tokenizer, problems = inputs.tokenizer_problems(config)
    return [
        *machine.output_problems(config),
        *problems,
        *inputs.environment_problems(config, tokenizer),
        *starts.checkpoint_problems(config, tokenizer),
        *inputs.hugging_face_problems(config, tokenizer),
        *critic.critic_problems(config, tokenizer),
        *teacher.teacher_problems(config, tokenizer),
        *wrong,
        *machine.quantization_problems(config),
        *machine.attention_problems(config),
        *machine.service_problems(config),
    ]
