"""Fused attention kernels for Metal and CUDA, on plain arrays.

    kernel_text      kernel source, with `prelude` for two compilers, and launches; `compiled` keeps CUDA's code
    tiling           shapes and threadgroups of the decode kernel
    decode_plan      the tokens that each query of a step reads
    decode           attention of few queries over packed blocks in place, and the merge of its splits
    latent_decode    the same over packed latents (MLA)
    rope_tables      rope tables for keys that a kernel builds
    append           quantises a step's keys and values, and writes them
    unpack           one row's blocks as contiguous keys or values, with or without residual KV
    definition       the same computations in numpy
    cases            test cases
    self_test        runs the kernels in a child process before they are used

`agentcache.models.fused` decides which kernels are used.
"""
