"""GLM-4.5 and later: the name and the arguments one by one, texts as they are and everything else as JSON::

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import re

from megatron_rl.environments.tool_calls.parser import Example, TaggedParser

WEATHER = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}


class Glm(TaggedParser):
    """Line breaks between the tags are left out by later models."""

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    begin = re.compile(r"<tool_call>([^<]*)")
    key = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    end_of_value = "</arg_value>"
    end = re.compile(r"\s*</tool_call>")
    close = "</tool_call>"
    written = "<tool_call>{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>", "</tool_call>"
    template = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>"
    examples = (
        Example(
            "Let me look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            (("get_weather", {"city": "Beijing", "days": 3}),),
            content="Let me look.",
            tools=WEATHER,
        ),
        Example("<tool_call>now</tool_call>\n<tool_call>now\n</tool_call>", (("now", {}), ("now", {}))),
        Example("<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value></tool_call>", (("a", {"b": "c"}),)),
    )

    def writes(self, template: str) -> bool:
        return "<arg_key>" in template and "<arg_value>" in template


PARSER = Glm()
