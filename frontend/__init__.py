"""LLM, AsyncLLM, the text side, and the clients of an engine."""
