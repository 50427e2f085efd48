"""Accelerator profiles: one YAML file each, read by name by whoever models an accelerator.

Keys: summary; device (`cuda` or `cpu`) and capability (CUDA compute capability, or null);
memory_bytes; memory_bandwidth and host_bandwidth (bytes/s, the latter one way between host and
device); flops (dense, by dtype, multiply and add counted as two); and what of that real kernels
reach: compute_efficiency, attention_efficiency, bandwidth_efficiency (fractions) and step_overhead
(seconds a step that no kernel explains).
"""
