"""The CPU backend in C++: one call for the forward step of a Llama-family decoder, one to choose tokens, one for both in turn.

`support` says whether it can run here and run a model, `weights` packs that one's weights, `model.CpuModel` runs it,
`sampling.kernels` chooses tokens, `decodes` takes several steps; `csrc/` has the kernels, which `build` compiles when the package
is installed.
Must not know: sampling parameters (but for `decodes`, what the kernels are asked for), sequences, anything above a flat batch.
"""
