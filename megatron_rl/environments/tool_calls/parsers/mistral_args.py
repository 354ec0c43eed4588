"""Mistral since 2025 (Magistral, Devstral): ``[TOOL_CALLS]add[ARGS]{"a": 1}``, one after the other."""

from __future__ import annotations

from megatron_rl.environments.tool_calls.parser import Example
from megatron_rl.environments.tool_calls.parsers.mistral import ARGUMENTS, CALLS, ID, Mistral


class MistralArgs(Mistral):
    """Some models write an id between name and arguments."""

    json_form = f"{CALLS}{{}}{ARGUMENTS}", ""
    around, between, close = ("", ""), "", ""
    template = f"{CALLS}{{{{ call.function.name }}}}{ARGUMENTS}{{{{ call.function.arguments | tojson }}}}"
    examples = (
        Example(f'{CALLS}add{ARGUMENTS}{{"a": 1, "b": 2}}', (("add", {"a": 1, "b": 2}),)),
        Example(
            f"Both.{CALLS}now{ID}abcdefghi{ARGUMENTS}{{}}{CALLS}now{{}}",
            (("now", {}), ("now", {})),
            content="Both.",
            ids=("abcdefghi", ""),
        ),
    )

    def writes(self, template: str) -> bool:
        return CALLS in template and ARGUMENTS in template


PARSER = MistralArgs()
