"""Everything that can be found wrong before a model is built, all of it reported together.

The configuration's own rules are `megatron_rl.config.validate`'s; here are the files, names and ports it
mentions. No process group is needed: `--check` calls this, and rank 0 of every launch.
"""

from megatron_rl.config.rl_config import RLConfig
from megatron_rl.errors import Problem
from megatron_rl.run.preflight import extensions, inputs, machine, models, starts


def preflight(config: RLConfig, is_run: bool = True) -> list[Problem]:
    """Every problem there is; of a model that is only asked, no ``is_run``, without environments and directories."""
    config, wrong = extensions.extension_problems(config)
    tokenizer, problems = inputs.tokenizer_problems(config)
    return [
        *(machine.output_problems(config) if is_run else ()),
        *problems,
        *(inputs.environment_problems(config, tokenizer) if is_run else ()),
        *starts.checkpoint_problems(config, tokenizer),
        *inputs.hugging_face_problems(config, tokenizer),
        *models.critic_problems(config, tokenizer),
        *models.teacher_problems(config, tokenizer),
        *wrong,
        *machine.quantization_problems(config),
        *machine.attention_problems(config),
        *machine.service_problems(config),
    ]
