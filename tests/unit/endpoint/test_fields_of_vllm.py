"""Fields and routes that vLLM has beside OpenAI's."""

from __future__ import annotations

from tests.support.endpoint import ASK, byte_tokenizer, completion, post, scripted


def test_variables_of_the_chat_template(tmp_path):
    template = "{{ 'T' if think else 'N' }}{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path, template)
    with scripted(tokenizer, lambda call: completion(tokenizer, tokenizer.decode(call.ids))) as endpoint:
        session = endpoint.open_session("")
        for path in ("/v1", f"/sessions/{session}/v1"):
            answers = [
                post(endpoint, ASK | fields, f"{path}/chat/completions").json()["choices"][0]["message"]["content"]
                for fields in ({"chat_template_kwargs": {"think": True}}, {})
            ]
            assert answers == ["T1+2|", "N1+2|"]
