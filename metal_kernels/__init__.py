"""Fused attention kernels for Metal and CUDA, on plain arrays.

    kernel_text   one body for two compilers: what each is given beside it, and how it is launched
    tiling        what the decode kernel is compiled for, and how a threadgroup is laid out
    decode_plan   which queries of a step read which tokens
    decode        few queries over packed blocks in place, with a prefix that rows share read once; the merge of splits
    latent_shape  what the kernel for latents (MLA) is compiled for, and how a threadgroup is laid out
    latent_decode few queries over packed latents in place
    rope_tables   how rope turns the keys that a kernel puts together
    append        a step's keys and values, quantised and written to where they belong
    unpack        one row's blocks as contiguous keys or values
    unpack_residual  the same with an adapter's residuals
    definition    what they compute, in numpy
    cases         steps to try them with
    latent_cases  the same for latents
    self_test     a child process that tries them on this device before they are used

`agentcache.models.fused` decides where they stand in for MLX's operations.
"""
