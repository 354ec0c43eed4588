"""Qwen3-Coder and Qwen3.5: the name and the arguments as tags, each argument on lines of its own::

<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.json_text import dumps
from megatron_rl.tool_calls.parser import Example, Written
from megatron_rl.tool_calls.tagged import TaggedParser

FILES = {"write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}}


class QwenCoder(TaggedParser):
    """The models at times leave out ``<tool_call>``."""

    markers = ("<tool_call>", "</tool_call>")
    begin = re.compile(r"(?:<tool_call>\s*)?<function=([^<>]*)>|<tool_call>")
    key = re.compile(r"\s*<parameter=([^<>]*)>")
    end_of_value, around_value = "</parameter>", "\n"
    end = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
    template = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>"
    examples = (
        Example(
            "I write it.\n<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=text>\n"
            "two\nlines\n</parameter>\n</function>\n</tool_call>",
            (("write", {"path": "a.txt", "text": "two\nlines"}),),
            content="I write it.",
            tools=FILES,
        ),
        Example("<function=now>\n</function>\n</tool_call>", (("now", {}),)),
    )

    def writes(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def write(self, calls: Sequence[Written]) -> str:
        return "\n".join(_written(name, arguments) for name, arguments in calls)


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in arguments.items():
        lines += [f"<parameter={key}>", value if isinstance(value, str) else dumps(value), "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


PARSER = QwenCoder()
