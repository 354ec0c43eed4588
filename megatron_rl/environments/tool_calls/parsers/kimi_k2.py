"""Kimi-K2: marks around each call and around all of them. The model writes the ids, which number its calls::

<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from megatron_rl.environments.tool_calls.parser import Example, MarkedParser

SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2(MarkedParser):
    """The template shows calls and results by the ids alone, so these must be the model's own."""

    markers = (*SECTION, BEGIN, ARGUMENTS, END)
    begin = re.compile(
        rf"(?:{re.escape(SECTION[0])}\s*)?{re.escape(BEGIN)}"
        rf"(?:\s*(?P<id>(?:functions\.)?(?P<name>[^<>:\s]+)(?::\d+)?)\s*{re.escape(ARGUMENTS)}\s*)?"
    )
    end = re.compile(rf"\s*{re.escape(END)}(?:\s*{re.escape(SECTION[1])})?")
    json_form, id_rule = (f"{BEGIN}functions.{{}}:{{id}}{ARGUMENTS}", END), "/[0-9]+/"
    around, between, close = SECTION, "", SECTION[1]
    template = f"{SECTION[0]}{BEGIN}{{{{ call['id'] }}}}{ARGUMENTS}{{{{ call['function']['arguments'] }}}}{END}"
    examples = (
        Example(
            f'{SECTION[0]}{BEGIN}functions.get_weather:3{ARGUMENTS}{{"city": "Beijing"}}{END}{SECTION[1]}',
            (("get_weather", {"city": "Beijing"}),),
            ids=("functions.get_weather:3",),
        ),
        Example(
            f"Both.{SECTION[0]}\n{BEGIN}functions.now:0{ARGUMENTS}{{}}{END}{BEGIN}now:1{ARGUMENTS}{{}}{END}{SECTION[1]}",
            (("now", {}), ("now", {})),
            content="Both.",
            ids=("functions.now:0", "now:1"),
        ),
    )

    def writes(self, template: str) -> bool:
        return BEGIN in template and ARGUMENTS in template


PARSER = KimiK2()
