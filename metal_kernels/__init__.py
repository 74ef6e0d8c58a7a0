"""Fused attention kernels for Metal and CUDA, on plain arrays.

    kernel_text      kernel source for two compilers, and launches
    tiling           shapes and threadgroups of the decode kernel
    decode_plan      the tokens that each query of a step reads
    decode, merge    attention of few queries over packed blocks in place
    latent_decode    the same over packed latents (MLA); `latent_shape` as `tiling`
    rope_tables      rope tables for keys that a kernel builds
    append           quantises a step's keys and values, and writes them
    unpack           one row's blocks as contiguous keys or values; `unpack_residual` with residual KV
    definition       the same computations in numpy
    cases            test cases; `latent_cases` for latents
    self_test        runs the kernels in a child process before they are used

`agentcache.models.fused` decides which kernels are used.
"""
