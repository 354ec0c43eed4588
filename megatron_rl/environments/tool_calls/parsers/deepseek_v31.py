"""DeepSeek-V3.1: marks around each call and around all of them; function and arguments have one between them::

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from megatron_rl.environments.tool_calls.parser import Example, MarkedParser

SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeek(MarkedParser):
    """Reads the form of DeepSeek-V3, too."""

    markers = (*SECTION, BEGIN, SEPARATOR, END)
    begin = re.compile(
        rf"(?:{SECTION[0]}\s*)?{BEGIN}(?:function{SEPARATOR}(?P<name>[^<>\s{{}}]+)\s*```json\s*|"
        rf"(?P<direct>[^<>\s{{}}]+){SEPARATOR})?"
    )
    end = re.compile(rf"\s*(?:```\s*)?{END}(?:\s*{SECTION[1]})?")
    json_form = f"{BEGIN}{{}}{SEPARATOR}", END
    around, between, close = SECTION, "", SECTION[1]
    template = f"{BEGIN}' + tool['function']['name'] + '{SEPARATOR}' + tool['function']['arguments'] + '{END}"
    examples = (
        Example(
            f'{SECTION[0]}{BEGIN}get_weather{SEPARATOR}{{"city": "Beijing"}}{END}{SECTION[1]}',
            (("get_weather", {"city": "Beijing"}),),
        ),
        Example(
            f"Both.{SECTION[0]}{BEGIN}now{SEPARATOR}{{}}{END}{BEGIN}now{SEPARATOR}{{}}{END}{SECTION[1]}",
            (("now", {}), ("now", {})),
            content="Both.",
        ),
    )

    def writes(self, template: str) -> bool:
        return SEPARATOR in template and "```json" not in template


PARSER = DeepSeek()
