"""Prompts to tokens, and tokens to text."""
