"""Layers that model families are built from. They import torch."""
