"""Fused attention kernels for Metal and CUDA on plain arrays; `models/fused.py` chooses among them."""
