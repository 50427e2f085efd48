"""Structured output: grammars are compiled beside the step loop, and followed in it by a host
logits processor."""
