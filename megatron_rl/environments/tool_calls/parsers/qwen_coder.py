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

from megatron_rl.environments.tool_calls.parser import Example, TaggedParser

FILES = {"write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}}


class QwenCoder(TaggedParser):
    """The models at times leave out ``<tool_call>``."""

    markers = ("<tool_call>", "</tool_call>")
    begin = re.compile(r"(?:<tool_call>\s*)?<function=([^<>]*)>|<tool_call>")
    key = re.compile(r"\s*<parameter=([^<>]*)>")
    end_of_value, around_value, close = "</parameter>", "\n", "</tool_call>"
    end = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
    written = "<tool_call>\n<function={}>", "<parameter={}>\n{}\n</parameter>", "</function>\n</tool_call>"
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


PARSER = QwenCoder()
