"""A tool server (MCP) with one tool, in plain Python; the official SDK writes the same in five lines.

It reads a JSON-RPC message a line from its standard input, and writes an answer a line to its standard output.
"""

import json
import operator
import sys

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TOOL = {
    "name": "calculate",
    "description": "Computes a sum, a difference, a product or a quotient of two numbers.",
    "inputSchema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "operation": {"enum": list(OPERATIONS)}, "b": {"type": "number"}},
        "required": ["a", "operation", "b"],
    },
}


def result_of(method: str, params: dict) -> dict:
    """What a request is answered with."""
    if method == "initialize":
        about = {"name": "calculator", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    given = params["arguments"]
    try:
        text, is_error = f"{OPERATIONS[given['operation']](given['a'], given['b']):.12g}", False
    except ArithmeticError as error:
        text, is_error = str(error), True
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:  # what has none is a notification
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result_of(message["method"], message["params"])}
        print(json.dumps(answer), flush=True)
