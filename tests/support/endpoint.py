"""An endpoint whose answers are written in the test, and the byte-level tokenizer it stands on."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.tokenizer import Tokenizer, load_tokenizer
from megatron_rl.types import Completion

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t['function']['name'] }} {% endfor %}]{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}({{ m['content'] }}){% else %}"
    "{{ m['content'] }}{{ '=' if m['role'] == 'user' else '<|end|>' if m['role'] == 'assistant' else ':' }}"
    "{% endif %}{% endfor %}"
)
"""Short: ``Be brief:1+2=3<|end|>2+2=``."""
ASK = {"model": "policy", "messages": [{"role": "user", "content": "1+2"}]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def byte_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    """A token a byte, and an end token; written to ``folder``."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)
    fast.save_pretrained(str(folder))
    return load_tokenizer(str(folder))


def completion(tokenizer: Tokenizer, text: str, reason: str = "stop") -> Completion:
    """``text`` as if it had been sampled; log-probs are -0, -1, -2 ..."""
    ids = (*tokenizer.encode(text), *([tokenizer.end_token_id] if reason == "stop" else []))
    return Completion(tuple(ids), tuple(-float(n) for n in range(len(ids))), reason, 3)


@contextlib.contextmanager
def scripted(
    tokenizer: Tokenizer, answer: Callable[[Call], Completion], token_by_token: bool = True, reasoning: str = "none"
) -> Iterator[Endpoint]:
    """An endpoint whose calls are answered by ``answer``, in a thread; streams get each token on its own."""
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            endpoint.wait_blocking(0.05)
            for call in endpoint.take():
                said = answer(call)
                for count in range(1, len(said.token_ids)) if token_by_token else ():
                    endpoint.progress(call.number, said.token_ids[:count])
                endpoint.deliver(call.number, said)

    with listening(tokenizer, reasoning) as endpoint:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield endpoint
        finally:
            ends.set()
            thread.join()


@contextlib.contextmanager
def listening(tokenizer: Tokenizer, reasoning: str = "none") -> Iterator[Endpoint]:
    """An endpoint whose calls wait."""
    endpoint = Endpoint(tokenizer, max_sequence_length=200, max_new_tokens=100, reasoning=reasoning)
    endpoint.start()
    try:
        yield endpoint
    finally:
        endpoint.close()


def client(endpoint: Endpoint, session: str | None = None) -> openai.OpenAI:
    """OpenAI's own."""
    return openai.OpenAI(base_url=endpoint.base_url(session), api_key=endpoint.token, max_retries=0)


def post(endpoint: Endpoint, body: object, path: str = "/v1/chat/completions", token: bytes = b"") -> httpx.Response:
    """A request as it is, of bytes or of what becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    authorization = token or f"Bearer {endpoint.token}".encode()
    return httpx.post(endpoint.url + path, content=content, headers={"Authorization": authorization}, timeout=120)
