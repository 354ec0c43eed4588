"""DeepSeek-V3: as V3.1, but with the word ``function`` first, and the arguments in a block of code::

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from megatron_rl.environments.tool_calls.parser import Example
from megatron_rl.environments.tool_calls.parsers.deepseek_v31 import BEGIN, END, SECTION, SEPARATOR, DeepSeek


class DeepSeekV3(DeepSeek):
    """DeepSeek-R1 writes the same."""

    json_form = f"{BEGIN}function{SEPARATOR}{{}}\n```json\n", f"\n```{END}"
    between = "\n"
    template = f"{BEGIN}' + tool['type'] + '{SEPARATOR}' + tool['function']['name'] + '\\n' + '```json' + '\\n'"
    examples = (
        Example(
            f'{SECTION[0]}{BEGIN}function{SEPARATOR}get_weather\n```json\n{{"city": "Beijing"}}\n```{END}{SECTION[1]}',
            (("get_weather", {"city": "Beijing"}),),
        ),
        *DeepSeek.examples,
    )

    def writes(self, template: str) -> bool:
        return SEPARATOR in template and "```json" in template


PARSER = DeepSeekV3()
