"""Triton kernels, one concern a file, and the attention backend and graph runner made of them.

Importing this imports neither torch nor Triton. With TRITON_INTERPRET=1, set before Triton is
imported, the kernels run in Triton's interpreter on a CPU: slow, and what the CPU tests use.
"""
