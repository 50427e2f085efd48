"""The sampler contract's arithmetic in torch, for samplers of any kind to build on."""
