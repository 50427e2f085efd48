"""What kernels and samplers share: uploads, rope tables, random draws, token order."""
