"""Chat templates as published models have them, with ``<|im_end|>`` for the end of a turn."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') }}
            {{- '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""The essentials of Qwen3's: thoughts before the last question are left out, and the results of tools are one turn."""


MISTRAL = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and loop.last or tools and loop.index0 == 0 %}
            {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception("an id of a call has nine letters or digits") }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "]") }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "assistant" %}
        {{- message.content + eos_token }}
    {%- elif message.role == "tool" %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception("an id of a call has nine letters or digits") }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
"""Of Mistral and Ministral of 2024: calls are one JSON list, and the template refuses ids of another length."""

MISTRAL_ARGS = r"""
{{- bos_token }}
{%- if tools %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
"""Of Magistral and Devstral: calls stand one after the other, without ids."""

LLAMA3 = r"""
{{- bos_token }}{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|start_header_id|>user<|end_header_id|>\n\n" }}
        {%- if tools and loop.index0 == 0 %}
            {{- 'Write {"name": function name, "parameters": dictionary of argument name and its value}.\n\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
        {%- endif %}
        {{- message.content + "<|eot_id|>" }}
    {%- elif "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one call in a turn") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" + "<|eot_id|>" }}
    {%- elif message.role == "assistant" %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\n\n" + message.content + "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + (message.content | tojson) + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{%- endif %}
"""
"""Of Llama 3.1 to 3.3: a call is bare JSON, and its result a turn of the role ipython, as JSON."""

QWEN_CODER = r"""
{%- if tools %}
    {{- "<|im_start|>system\n# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n<function>\n<name>" + tool.function.name + "</name>\n</function>" }}{%- endfor %}
    {{- "\n</tools>\n\n<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>" }}
    {{- "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\n" }}{%- endif %}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "<tool_call>\n<function=" + call.function.name + ">\n" }}
            {%- for name, value in call.function.arguments | items %}
                {{- "<parameter=" + name + ">\n" + (value if value is string else value | tojson) }}
                {{- "\n</parameter>\n" }}
            {%- endfor %}
            {{- "</function>\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}
"""
"""Of Qwen3-Coder, and Qwen3.5 without thoughts: arguments are tags, each on lines of its own."""

GLM = r"""
{{- "[gMASK]<sop>" }}
{%- if tools %}
    {{- "<|system|>\n# Tools\n\n<tools>\n" }}
    {%- for tool in tools %}{{- (tool | tojson) + "\n" }}{%- endfor %}
    {{- "</tools>\n\n<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" }}
    {{- "\n</tool_call>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|user|>\n" + message.content }}
    {%- elif message.role == "assistant" %}
        {{- "<|assistant|>\n<think></think>" }}
        {%- if message.content %}{{- "\n" + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- "\n<tool_call>" + call.function.name + "\n" }}
            {%- for name, value in call.function.arguments | items %}
                {{- "<arg_key>" + name + "</arg_key>\n<arg_value>" }}
                {{- (value if value is string else value | tojson) + "</arg_value>\n" }}
            {%- endfor %}
            {{- "</tool_call>" }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{- "<|observation|>" }}{%- endif %}
        {{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{%- endif %}
"""
"""Of GLM-4.5: no token ends a turn, the next turn's role does."""

_DEEPSEEK = r"""
{{- bos_token }}
{%- for tool in tools or [] %}{{- "\n### " + tool.function.name }}{%- endfor %}
{%- set ns = namespace(results=false) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<｜User｜>" + message.content }}
    {%- elif message.role == "assistant" %}
        {{- "<｜Assistant｜>" + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "<｜tool▁calls▁begin｜>" if loop.first else BETWEEN }}
            {{- "<｜tool▁call▁begin｜>" + CALL + "<｜tool▁call▁end｜>" }}
            {{- "<｜tool▁calls▁end｜>" if loop.last }}
        {%- endfor %}
        {{- "<｜end▁of▁sentence｜>" }}
    {%- elif message.role == "tool" %}
        {{- "RESULTS<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" }}
        {%- set ns.results = true %}
    {%- endif %}
{%- endfor %}
{{- END if ns.results }}
{%- if add_generation_prompt and not ns.results %}{{- "<｜Assistant｜>" }}{%- endif %}
"""

DEEPSEEK_V3 = (
    _DEEPSEEK.replace("BETWEEN", r'"\n"')
    .replace("CALL", r"call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' + ARGUMENTS + '\n```'")
    .replace("ARGUMENTS", "call.function.arguments")
    .replace("RESULTS", "<｜tool▁outputs▁begin｜>")
    .replace("END", '"<｜tool▁outputs▁end｜>"')
)
"""Its arguments must be text. After results the model goes on without a word before its turn."""

DEEPSEEK_V31 = (
    _DEEPSEEK.replace("BETWEEN", '""')
    .replace("CALL", "call.function.name + '<｜tool▁sep｜>' + call.function.arguments")
    .replace("RESULTS", "")
    .replace("END", '""')
)

KIMI_K2 = r"""
{%- if tools %}{{- "<|im_system|>tool_declare<|im_middle|>" + (tools | tojson) + "<|im_end|>" }}{%- endif %}
{%- for message in messages %}
    {%- set role = message.name or message.role %}
    {%- set side = message.role if message.role in ("user", "assistant") else "system" %}
    {{- "<|im_" + side + "|>" + role + "<|im_middle|>" }}
    {%- if message.role == "tool" %}{{- "## Return of " + message.tool_call_id + "\n" }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- "<|tool_calls_section_begin|>" }}
        {%- for call in message.tool_calls %}
            {{- "<|tool_call_begin|>" + call.id + "<|tool_call_argument_begin|>" }}
            {{- (call.function.arguments | tojson) + "<|tool_call_end|>" }}
        {%- endfor %}
        {{- "<|tool_calls_section_end|>" }}
    {%- endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_assistant|>assistant<|im_middle|>" }}{%- endif %}
"""
"""Calls, and the turns of their results, are named by the ids that the model wrote."""

HARMONY = r"""
{{- "<|start|>system<|message|>" }}
{%- if tools %}{{- "Calls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- "<|end|>" }}
{%- if tools %}
    {{- "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n" }}
    {%- for tool in tools %}{{- "type " + tool.function.name + " = () => any;\n" }}{%- endfor %}
    {{- "} // namespace functions<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- (call.arguments | tojson) + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- set last.name = none %}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- (message.content | tojson) + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
"""Of gpt-oss: a turn has one call, and a result is refused without it."""

GEMMA3 = r"""
{{- bos_token }}
{%- for message in messages %}
    {{- "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\n" }}
    {{- (message.content | trim) + "<end_of_turn>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\n" }}{%- endif %}
"""
"""It shows no tools. Neither do those of OLMo 2, Moonlight and Qwen2's base models."""

OF_FAMILIES = {
    "Qwen2.5, Qwen3, Qwen3-Next": (QWEN3, "hermes"),
    "Qwen3-Coder, Qwen3.5": (QWEN_CODER, "qwen_coder"),
    "Llama 3": (LLAMA3, "llama"),
    "Mistral, Ministral": (MISTRAL, "mistral"),
    "Magistral, Devstral": (MISTRAL_ARGS, "mistral_args"),
    "gpt-oss": (HARMONY, "harmony"),
    "GLM-4.5": (GLM, "glm"),
    "DeepSeek-V3": (DEEPSEEK_V3, "deepseek_v3"),
    "DeepSeek-V3.1": (DEEPSEEK_V31, "deepseek_v31"),
    "Kimi-K2": (KIMI_K2, "kimi_k2"),
    "Gemma 3": (GEMMA3, ""),
}
"""Family -> its template's essentials for tools, and the parser that reads its calls; without thoughts."""
