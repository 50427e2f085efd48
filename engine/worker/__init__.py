"""The model runner: batch, KV pool, forward pass, sampling step."""
