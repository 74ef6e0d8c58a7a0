"""Fused attention kernels for Metal and CUDA, on plain arrays.

    kernel_text      kernel source for two compilers, and launches
    tiling           shapes for which the decode kernel is compiled, and its threadgroups
    decode_plan      the tokens that each query of a step reads
    decode           attention of few queries over packed blocks in place; shared prefixes are read once
    merge            merges the splits of the decode kernels
    latent_shape     as `tiling`, for latents (MLA)
    latent_decode    attention of few queries over packed latents in place
    rope_tables      rope tables for keys that a kernel builds
    append           quantises a step's keys and values, and writes them
    unpack           one row's blocks as contiguous keys or values
    unpack_residual  the same with residual KV
    definition       the same computations in numpy
    cases            test cases
    latent_cases     test cases for latents
    self_test        runs the kernels in a child process before they are used

`agentcache.models.fused` decides which kernels replace MLX's operations.
"""
