"""FlashInfer's kernels: an attention backend and a sampler.

Importing this imports neither torch nor FlashInfer.
"""
