"""Metrics, the live page, and routes for operators."""
