"""From what a request asks of its answers to what the engine is told: a grammar, and where an answer ends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_rl.endpoint.fields import refuse
from megatron_rl.endpoint.options import Drawing, Options
from megatron_rl.endpoint.protocol import ChatRequest
from megatron_rl.environments.tool_calls import Tools
from megatron_rl.environments.tool_calls.grammar import Literal
from megatron_rl.environments.tool_calls.schemas import schemas_of
from megatron_rl.errors import ConfigError
from megatron_rl.inference.guides import Grammars, literal
from megatron_rl.registry import PARSERS
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.types import Constraints

MAX_GRAMMAR = 2**17
"""Characters of a grammar, schemas of tools included: compiling one takes seconds."""
TRAINED = "the answers of this session are trained on, as the model draws them by itself"


class Shaping:
    """The shaping of one endpoint's answers; its methods are called in the text thread."""

    def __init__(self, tokenizer: Tokenizer, fixed: str = "") -> None:
        """``fixed`` says why this engine draws from the model's own distribution alone; empty where it need not."""
        self._tokenizer, self._fixed = tokenizer, fixed
        self._grammars = Grammars(tokenizer)

    def of_text(self, options: Options, is_trained: bool) -> Drawing:
        """Return how the answers to a text are drawn.

        Raises:
            ApiError: the grammar cannot be compiled, or nothing may change the distribution here.
        """
        rule = options.shape.rule if options.shape else ""
        return self._shaped(options, f"start: {rule}" if rule else "", is_trained)

    def of_chat(self, request: ChatRequest, parser: str, is_trained: bool) -> Drawing:
        """Return how the answers to a chat are drawn; ``parser`` reads its calls. Errors as of `of_text`."""
        options, form = request.options, PARSERS.get(parser) if parser else None
        tools = request.forced or (request.tools if request.reads_calls and options.shape else ())
        if tools:
            return self._shaped(options, self._calls(tools, parser, request), is_trained)
        drawing = self.of_text(options, is_trained)
        if not (request.one_call and request.reads_calls):
            return drawing
        if not form.close:
            refuse("parallel_tool_calls", "is false, and calls of this model have no end mark; leave it out")
        # An end that the model drew, as that of a stop string is, so that such answers can be trained on.
        special = self._tokenizer.special_tokens.get(form.close)
        if special is None:
            return replace(drawing, stop=(*drawing.stop, form.close))
        return replace(drawing, stop_token_ids=(*drawing.stop_token_ids, special))

    def _calls(self, tools: Tools, parser: str, request: ChatRequest) -> str:
        """The grammar of calls, or of the shape that is asked for."""
        form, write = PARSERS.get(parser), self._literal
        rules, shape = form.grammar(schemas_of(tools), write), request.options.shape
        if not rules:
            refuse("tool_choice", f"cannot be made to hold: {parser!r} has no grammar of its calls; give 'auto'")
        calls = form.answer(write, bool(request.one_call))
        if shape is None:
            return f"start: {calls}\n{rules}"
        return f"start: {calls} | answer\n{rules}\nanswer: {shape.rule}"

    @property
    def _literal(self) -> Literal:
        return partial(literal, unsplit_tokens=self._tokenizer.unsplit_tokens)

    def _shaped(self, options: Options, grammar: str, is_trained: bool) -> Drawing:
        drawing = options.drawing
        if not grammar and drawing.constraints is None:
            return drawing
        param = options.shape.param if options.shape else "tool_choice" if grammar else drawing.constrained_by
        if is_trained or self._fixed:
            why = TRAINED if is_trained else self._fixed
            refuse(param, f"changes what answers are drawn from, and {why}; leave it out", "unsupported_parameter")
        if len(grammar) > MAX_GRAMMAR:
            refuse(param, f"makes a grammar of {len(grammar):,} characters; ask for one of {MAX_GRAMMAR:,} at most")
        if grammar:
            try:
                self._grammars.matcher(grammar)
            except ConfigError as error:
                refuse(param, f"cannot be made to hold: {'; '.join(error.lines)}")
        return replace(drawing, constraints=replace(drawing.constraints or Constraints(), grammar=grammar))
