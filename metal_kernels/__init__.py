"""Fused attention kernels for Metal and CUDA.

None has landed yet: the mx-op reference in `agentcache.models` serves on every back end, and is the specification that
a kernel will have to match before it may stand in.
"""
