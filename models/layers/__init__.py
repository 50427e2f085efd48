"""Layers that model families are built from. All but `rope_config` import torch."""
