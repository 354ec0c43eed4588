"""What the study trains: five settings, and for each the formats and corrections to compare."""

from __future__ import annotations

from dataclasses import dataclass, replace

ALIGNED = "aligned"
"""In the place of a correction: the trainer's forward pass runs quantised, too."""
REPLAY = "+replay"
"""Behind a correction: the trainer uses the experts that the rollout chose."""
PARTIAL = "+partial"
"""Behind a correction: groups that are not generated in time go on in the next step, with the newer weights."""
OWN = {"int4": "examples/fidelity/int4.py:RECIPE"}
"""Formats that are not the library's, and where they lie."""

MODEL = (
    "--num-layers 3 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias "
    "--untie-embeddings-and-output-weights --init-method-std 0.125 --embedding-init-method-std 0.5 "
    "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 16 "
    "--use-distributed-optimizer --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0"
)
EXPERTS_MODEL = f"{MODEL} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96"


@dataclass(frozen=True)
class Setting:
    """One task and how it is trained on."""

    name: str
    environment: dict[str, object]
    """Arguments of the arithmetic environment."""
    sequence: int
    new_tokens: int
    warm_iters: int
    steps: int
    updates_per_step: int
    pairs: tuple[tuple[str, str], ...]
    """(recipe, correction) to compare; the first is the reference."""
    prompts: int = 16
    group: int = 16
    lr: float = 8e-4
    held_out: int = 256
    model: str = MODEL

    def warm_start(self) -> list[str]:
        """Flags of the supervised warm start, as in the quickstart."""
        decay = round(0.3 * self.warm_iters)
        return (
            f"{self.model} --seq-length {self.sequence} --train-iters {self.warm_iters} --global-batch-size 32 "
            f"--micro-batch-size 32 --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 20 --weight-decay 0.01 "
            f"--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters {decay} --log-interval 500"
        ).split()

    def grpo(self, recipe: str, correction: str) -> list[str]:
        """Flags of one GRPO run."""
        samples = self.prompts * self.group
        flags = (
            f"{self.model} --seq-length {self.sequence} --perform-rl-step --grpo-group-size {self.group} "
            f"--grpo-prompts-per-step {self.prompts} --grpo-iterations 1 --grpo-clamp-eps-lower 0.2 "
            f"--grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.0 --rl-temperature 1.0 "
            f"--rl-max-new-tokens {self.new_tokens} --micro-batch-size {samples // self.updates_per_step} "
            f"--global-batch-size {samples // self.updates_per_step} "
            f"--train-iters {self.steps} "
            f"--lr {self.lr} --min-lr {0.3 * self.lr:g} --lr-decay-style linear --lr-warmup-iters 5 --weight-decay 0.0 "
            f"--eval-interval {max(1, self.steps // 4)} --rl-prompts-per-eval {self.held_out} "
            f"--rl-samples-per-eval-prompt 8 --log-interval 1 --rl-rollout-quantization {OWN.get(recipe, recipe)}"
        ).split()
        if correction.endswith(REPLAY):
            flags, correction = [*flags, "--rl-router-replay"], correction.removesuffix(REPLAY)
        if correction.endswith(PARTIAL):
            flags, correction = [*flags, "--rl-partial-rollouts"], correction.removesuffix(PARTIAL)
        if correction == ALIGNED:
            return [*flags, "--rl-train-forward", "quantized", "--rl-correction", "none"]
        # Corrected or not, what is compared is the learned policy in full precision.
        return [*flags, "--rl-correction", correction, "--rl-evaluate-unquantized"]


_CORRECTIONS = ("none", "token_tis")

EASY = Setting(
    name="easy",
    environment={},
    sequence=64,
    new_tokens=44,
    warm_iters=1500,
    steps=80,
    updates_per_step=1,
    pairs=(
        ("none", "none"),
        *((recipe, c) for recipe in ("fp8", "fp8_block_pow2", "int8") for c in (*_CORRECTIONS, ALIGNED)),
    ),
)
HARD = Setting(
    name="hard",
    environment={"min_terms": 6, "max_terms": 12},
    sequence=128,
    new_tokens=100,
    warm_iters=1500,
    steps=100,
    updates_per_step=4,
    pairs=(
        ("none", "none"),
        *((recipe, c) for recipe in ("fp8", "int8", "int4") for c in _CORRECTIONS),
        ("fp8_block_pow2", "token_tis"),
        ("int8", ALIGNED),
        ("int4", ALIGNED),
    ),
    prompts=8,
    group=16,
)
EXPERTS = Setting(
    name="experts",
    environment={"demonstrations": 19_200},  # so that 600 iterations end in the bad habit
    sequence=64,
    new_tokens=44,
    warm_iters=600,
    steps=40,
    updates_per_step=1,
    pairs=(
        ("none", "none"),
        *((recipe, c) for recipe in ("int8", "fp8") for c in ("none", f"none{REPLAY}")),
    ),
    held_out=128,
    model=EXPERTS_MODEL,
)
_MOST_USED = (("none", "none"), *((recipe, c) for recipe in ("int8", "fp8") for c in _CORRECTIONS))
SEEDS = replace(HARD, name="seeds", steps=60, pairs=_MOST_USED)  # stops while the reward still rises
PUT_ASIDE = replace(HARD, name="partial", pairs=(("none", "none"), ("none", f"token_tis{PARTIAL}")))
SETTINGS = {setting.name: setting for setting in (EASY, HARD, SEEDS, EXPERTS, PUT_ASIDE)}


def quick(setting: Setting) -> Setting:
    """The same shape in minutes; its numbers only show that everything runs."""
    kept = tuple(pair for pair in setting.pairs if pair[0] in ("none", "int8", "int4"))
    return Setting(
        **{**vars(setting), "warm_iters": 200, "steps": 8, "prompts": 4, "group": 8, "held_out": 16, "pairs": kept}
    )
