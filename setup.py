"""Package metadata. ``environments/`` is installed as ``megatron_rl_environments``."""

from pathlib import Path

from setuptools import find_packages, setup

LIBRARY = find_packages(include=["megatron_rl", "megatron_rl.*"])
ENVIRONMENTS = [
    "megatron_rl_environments" + name[len("environments"):]
    for name in find_packages(include=["environments", "environments.*"])
]

setup(
    name="megatron-rl",
    version="0.1.0",
    description="Reinforcement learning of language models inside one Megatron process per GPU",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "language models", "GRPO", "DAPO", "PPO", "Megatron", "PyTorch"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11,<3.13",
    packages=LIBRARY + ENVIRONMENTS,
    package_dir={"megatron_rl_environments": "environments"},
    package_data={"megatron_rl": ["py.typed", "config/*.txt", "cli/*.txt", "metrics/page/*", "environments/new/*.txt"]},
    # Up to what the tests ran with (constraints.txt): a later torch is another program, which pip would take unasked.
    install_requires=[
        "torch>=2.11,<2.14",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.0,<6",
        "tokenizers>=0.22,<0.24",
        "safetensors>=0.5,<0.9",
        "flask-restful>=0.3.10,<0.4",
        "waitress>=3.0.2,<4",
        "aiohttp>=3.10,<4",
        "uvloop>=0.21,<0.24",
        "datasets>=4.0,<6",
        "wandb>=0.24,<1",
        "tensorboard>=2.19,<3",
        "pyyaml>=6.0,<7",
        "numpy>=1.26,<3",
        "psutil>=6.0,<8",
        "rich>=13.0,<16",
        "math-verify>=0.8,<0.10",
    ],
    extras_require={
        # harness environments and judges; with verifiers 0.4 a version below 3
        "agents": ["openai>=2.0,<4"],
        "verifiers": ["verifiers>=0.4,<0.5"],
        # transformers loads quantised exports with these, and asks for these versions
        "export": ["accelerate>=1.1.0,<2", "compressed-tensors>=0.15.0,<0.21"],
        # response_format and forced calls of `megatron-rl serve`
        "structured": ["llguidance>=1.3,<2"],
        "gguf": ["gguf>=0.17,<0.20", "accelerate>=1.1.0,<2"],
        # metrics/hf_evaluate.py, for scripts of your own; no run imports it
        "evaluate": ["evaluate>=0.4.6,<0.5"],
        "te": ["transformer-engine[pytorch]>=2.8"],
        "docs": ["mkdocs-material>=9.5,<10"],
        "test": [
            "pytest>=8.0",
            "pytest-xdist>=3.8",
            "ruff>=0.9",
            "import-linter>=2.1",
            'triton>=3.6; sys_platform == "linux"',
            "accelerate>=1.1.0",
            "compressed-tensors>=0.15.0",
            "evaluate>=0.4.6,<0.5",
            "gguf>=0.17,<0.20",
            "llguidance>=1.3,<2",
            "openai>=2.0,<4",
            "peft>=0.18,<0.22",
            "verifiers>=0.4,<0.5",
        ],
    },
    entry_points={
        "console_scripts": [
            "megatron-rl=megatron_rl.cli:entry",
            "megatron-rl-environments=megatron_rl.environments.__main__:main",
        ]
    },
)
